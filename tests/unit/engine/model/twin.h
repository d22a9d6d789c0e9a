// Undisturbed sessions in an engine with plenty of memory: what a session's answers must be, bit for bit, whatever
// became of it meanwhile.
#ifndef ATTND_TESTS_UNIT_ENGINE_MODEL_TWIN_H_
#define ATTND_TESTS_UNIT_ENGINE_MODEL_TWIN_H_

#include <memory>
#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "tests/unit/engine/model/model_session.h"

namespace attnd {

class Twins {
 public:
  Twins();

  // Answers of the session's rows [start, start + rows) of a layer: all its tokens are prefilled at once and then asked
  // for. Empty when the twin's engine refuses, which `*error` tells.
  std::vector<float> Ask(const ModelSession& session, int layer, int64_t start, int64_t rows, uint64_t query_seed,
                         std::string* error);

 private:
  std::unique_ptr<Engine> engine_;
  std::vector<std::string> ids_;  // of each kind; "": none yet
};

}  // namespace attnd

#endif  // ATTND_TESTS_UNIT_ENGINE_MODEL_TWIN_H_

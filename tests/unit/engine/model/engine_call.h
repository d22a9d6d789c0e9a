// Calls to an engine, made now and answered later.
#ifndef ATTND_TESTS_UNIT_ENGINE_MODEL_ENGINE_CALL_H_
#define ATTND_TESTS_UNIT_ENGINE_MODEL_ENGINE_CALL_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "server/engine/engine.h"
#include "tests/unit/engine/model/model_session.h"

namespace attnd {

// One segment of a step, and what it brings.
struct SegmentCall {
  std::string session_id;
  std::vector<ModelToken> tokens;  // of a step that appends
  int64_t num_tokens = 0;
  std::optional<int64_t> start;
  bool rewind = false;
};

struct EngineCall {
  enum class Kind { kCreate, kStep, kFork, kRewind, kReorder, kClose, kExport, kImport };

  Kind kind = Kind::kStep;
  const ModelKind* of = nullptr;  // create and step
  std::string session_id;         // fork, rewind, close, export
  std::optional<int64_t> length;  // fork, rewind
  std::vector<std::string> rows;  // reorder
  std::vector<int> sources;
  int layer = 0;  // step
  bool appends = true, attends = true;
  uint64_t query_seed = 0;
  std::vector<SegmentCall> segments;
  std::string snapshot;    // import
  size_t piece_bytes = 0;  // in which it is written
  bool is_damaged = false;
  std::shared_ptr<const ModelSession> imported;  // what it is of

  // The answer, once `done`.
  absl::Notification done;
  absl::Status status;
  SessionInfo info;
  StepOutcome outcome;
  std::vector<float> out;
  std::vector<int64_t> lengths;
  bool was_open = false;
  std::unique_ptr<SessionExport> exported;

  // Sessions that it names.
  std::vector<std::string> Names() const;
  std::string Name() const;  // step, fork, ...
  std::string Describe() const;
};

// The call must live until it is done.
void Make(Engine* engine, EngineCall* call);
// A word for the outcome: the error's reason, or its code where it has none; "": success.
std::string ReasonOf(const absl::Status& status);

}  // namespace attnd

#endif  // ATTND_TESTS_UNIT_ENGINE_MODEL_ENGINE_CALL_H_

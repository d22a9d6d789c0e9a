// Which model: a name whose shape is known, changed by flags; and what its cache costs, by arithmetic.
#ifndef ATTND_CLIENT_TOOL_MODEL_FLAGS_H_
#define ATTND_CLIENT_TOOL_MODEL_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/types.h"
#include "client/tool/flags.h"

namespace attnd::tool {

struct ModelShape {
  const char* name;
  int num_layers;
  int num_q_heads;
  int num_kv_heads;
  int head_dim;
  int64_t context;  // the longest that the model was trained for
};

const std::vector<ModelShape>& KnownModels();

// --model, --layers, --q_heads, --kv_heads, --head_dim, --value_dim, --kv.
class ModelFlags {
 public:
  // `default_model`: a known model's name, or "none": no model unless asked for. `default_layers` 0: the model's.
  ModelFlags(FlagSet* flags, const std::string& default_model, int64_t default_layers = 0);

  bool given() const { return model_ != "none"; }
  // INVALID_ARGUMENT: heads that do not divide; a custom model without its heads.
  absl::StatusOr<client::SessionConfig> Config() const;
  int64_t trained_context() const;  // 0: unknown
  // "llama3-8b: 32 layers, 32/8 heads, head_dim 128, KV in bf16". REQUIRES: Config() is ok.
  std::string Describe() const;

 private:
  std::string model_;
  std::string kv_ = "f32";
  int64_t layers_;  // 0 in this and the next four: the model's
  int64_t q_heads_ = 0;
  int64_t kv_heads_ = 0;
  int64_t head_dim_ = 0;
  int64_t value_dim_ = 0;
};

}  // namespace attnd::tool

#endif  // ATTND_CLIENT_TOOL_MODEL_FLAGS_H_

#include "client/tool/model_flags.h"

#include "absl/strings/str_cat.h"

namespace attnd::tool {
namespace {

const ModelShape* FindModel(const std::string& name) {
  for (const ModelShape& model : KnownModels()) {
    if (name == model.name) return &model;
  }
  return nullptr;
}

}  // namespace

const std::vector<ModelShape>& KnownModels() {
  static const std::vector<ModelShape> models = {
      {"llama3-8b", 32, 32, 8, 128, 8192},
      {"gpt2", 12, 12, 12, 64, 1024},
      {"smollm2-135m", 30, 9, 3, 64, 8192},
  };
  return models;
}

ModelFlags::ModelFlags(FlagSet* flags, const std::string& default_model, int64_t default_layers)
    : model_(default_model), layers_(default_layers) {
  std::vector<std::string> names;
  if (default_model == "none") names.push_back("none");
  for (const ModelShape& model : KnownModels()) names.push_back(model.name);
  names.push_back("custom");
  flags->Choice("model", &model_, names, "whose shape to take; the flags below change it");
  flags->Int("layers", &layers_, 0, 1024, "number of layers; 0: the model's, as below");
  flags->Int("q_heads", &q_heads_, 0, 65536, "number of query heads");
  flags->Int("kv_heads", &kv_heads_, 0, 65536, "number of key and value heads");
  flags->Int("head_dim", &head_dim_, 0, 256, "dimension of Q and K");
  flags->Int("value_dim", &value_dim_, 0, 256, "dimension of V; 0: as head_dim");
  flags->Choice("kv", &kv_, {"f32", "bf16", "f16", "int8"}, "how K and V are stored");
}

absl::StatusOr<client::SessionConfig> ModelFlags::Config() const {
  const ModelShape custom = {"custom", 0, 0, 0, 0, 0};
  const ModelShape* model = FindModel(model_);
  if (model == nullptr) model = &custom;
  const auto pick = [](int64_t flag, int known) { return flag != 0 ? static_cast<int>(flag) : known; };
  client::SessionConfig config;
  config.num_layers = pick(layers_, model->num_layers);
  config.num_q_heads = pick(q_heads_, model->num_q_heads);
  config.num_kv_heads = pick(kv_heads_, model->num_kv_heads);
  config.head_dim = pick(head_dim_, model->head_dim);
  config.value_dim = static_cast<int>(value_dim_);
  config.kv_dtype = *client::ParseKvDType(kv_);
  if (config.num_layers == 0 || config.num_q_heads == 0 || config.num_kv_heads == 0 || config.head_dim == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--model=", model_, " needs --layers, --q_heads, --kv_heads and --head_dim"));
  }
  if (config.num_q_heads % config.num_kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--q_heads: ", config.num_q_heads, " is not a multiple of --kv_heads ", config.num_kv_heads));
  }
  return config;
}

int64_t ModelFlags::trained_context() const {
  const ModelShape* model = FindModel(model_);
  return model == nullptr ? 0 : model->context;
}

std::string ModelFlags::Describe() const {
  const client::SessionConfig config = *Config();
  std::string text = absl::StrCat(model_, ": ", config.num_layers, " layers, ", config.num_q_heads, "/",
                                  config.num_kv_heads, " heads, head_dim ", config.head_dim);
  if (config.value_dim != 0) absl::StrAppend(&text, ", value_dim ", config.value_dim);
  return absl::StrCat(text, ", KV in ", client::Name(config.kv_dtype));
}

}  // namespace attnd::tool

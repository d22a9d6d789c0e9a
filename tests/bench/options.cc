#include "tests/bench/options.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <string_view>

namespace attnd::bench {
namespace {

int UsableThreads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

template <class T>
bool ParseNumber(std::string_view text, T min, T max, T* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && *value >= min && *value <= max;
}

bool ParseShape(std::string_view name, ModelShape* shape) {
  for (const ModelShape& known : ModelShapes()) {
    if (name == known.name) {
      *shape = known;
      return true;
    }
  }
  return false;
}

bool ParseKv(std::string_view name, KvDType* kv) {
  for (const KvDType known : {KvDType::kF32, KvDType::kBf16}) {
    if (name == KvName(known)) {
      *kv = known;
      return true;
    }
  }
  return false;
}

bool ParseOne(std::string_view name, std::string_view value, Options* options) {
  if (name == "--shape") return ParseShape(value, &options->shape);
  if (name == "--kv") return ParseKv(value, &options->kv);
  if (name == "--tokens") return ParseNumber<int64_t>(value, 1, int64_t{1} << 24, &options->tokens);
  if (name == "--threads") return ParseNumber(value, 1, 1024, &options->threads);
  if (name == "--layers") return ParseNumber(value, 1, 1 << 20, &options->layers);
  if (name == "--seconds") return ParseNumber(value, 0.01, 3600.0, &options->seconds);
  if (name == "--json") return value.empty() && (options->json = true);
  return false;
}

}  // namespace

const std::vector<ModelShape>& ModelShapes() {
  static const std::vector<ModelShape> kShapes = {
      {"llama3-8b", 32, 8, 128},  {"llama3-70b", 64, 8, 128}, {"gpt2", 12, 12, 64},
      {"smollm2-135m", 9, 3, 64}, {"qwen2-7b", 28, 4, 128},   {"gemma2-9b", 16, 8, 256},
  };
  return kShapes;
}

bool ParseOptions(const std::vector<std::string>& arguments, Options* options, std::string* error) {
  for (const std::string& argument : arguments) {
    const std::string_view text = argument;
    const size_t equals = std::min(text.find('='), text.size());
    const std::string_view value = text.substr(std::min(equals + 1, text.size()));
    if (ParseOne(text.substr(0, equals), value, options)) continue;
    *error = "bad argument '" + argument + "'";
    return false;
  }
  if (options->threads == 0) options->threads = UsableThreads();
  return true;
}

std::string OptionsHelp() {
  std::string help = "  --shape=NAME    layer of";
  for (const ModelShape& shape : ModelShapes()) help += std::string(" ") + shape.name;
  return help +
         "\n  --tokens=N      context (4096)\n  --kv=f32|bf16   element type of the cache (f32)\n"
         "  --threads=N     (all that this process may use)\n  --layers=N      layers in turn (enough to come from "
         "memory)\n"
         "  --seconds=S     of measurement (2)\n  --json          one object a row\n";
}

const char* KvName(KvDType dtype) { return dtype == KvDType::kF32 ? "f32" : "bf16"; }

}  // namespace attnd::bench

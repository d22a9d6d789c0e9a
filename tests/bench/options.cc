#include "tests/bench/options.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <utility>

namespace attnd::bench {
namespace {

constexpr std::array<std::pair<std::string_view, KvDType>, 4> kKvNames = {
    {{"f32", KvDType::kF32}, {"bf16", KvDType::kBf16}, {"f16", KvDType::kF16}, {"int8", KvDType::kInt8}}};
constexpr std::array<std::pair<std::string_view, DType>, 3> kSourceNames = {
    {{"f32", DType::kF32}, {"bf16", DType::kBf16}, {"f16", DType::kF16}}};
constexpr std::array<std::pair<std::string_view, Residency>, 2> kResidencyNames = {
    {{"memory", Residency::kMemory}, {"cache", Residency::kCache}}};
constexpr std::array<std::pair<std::string_view, std::string_view>, 3> kOfNames = {
    {{"decode", "decode"}, {"prefill", "prefill"}, {"fork", "fork"}}};

// What is wrong with an item of a list; empty: nothing.
using Complaint = std::string;

template <class T>
Complaint ReadNumber(std::string_view text, T min, T max, T* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  if (error == std::errc() && end == text.data() + text.size() && *value >= min && *value <= max) return {};
  std::string range;
  if constexpr (std::is_integral_v<T>) {
    range = "a whole number from " + std::to_string(min) + " to " + std::to_string(max);
  } else {
    range = "a number from 0.01 to 3600";
  }
  return "'" + std::string(text) + "' is not " + range;
}

template <class Table, class T>
Complaint ReadName(const Table& names, std::string_view text, T* value) {
  std::string known;
  for (const auto& [name, meaning] : names) {
    if (text == name) {
      *value = T(meaning);
      return {};
    }
    known += (known.empty() ? "" : ", ") + std::string(name);
  }
  return "'" + std::string(text) + "' is not one of " + known;
}

Complaint ReadShape(std::string_view text, ModelShape* shape) {
  std::vector<std::pair<std::string_view, ModelShape>> names;
  for (const ModelShape& known : ModelShapes()) names.emplace_back(known.name, known);
  return ReadName(names, text, shape);
}

Complaint ReadHeads(std::string_view text, ModelShape* shape) {
  constexpr int kMaxHeads = 1024;
  const size_t slash = std::min(text.find('/'), text.size());
  const bool read = ReadNumber(text.substr(0, slash), 1, kMaxHeads, &shape->num_q_heads).empty() &&
                    slash < text.size() &&
                    ReadNumber(text.substr(slash + 1), 1, kMaxHeads, &shape->num_kv_heads).empty();
  if (read && shape->num_q_heads % shape->num_kv_heads == 0) return {};
  return "'" + std::string(text) + "' is not QUERY_HEADS/KV_HEADS, of which the first is a multiple of the second";
}

Complaint ReadThreads(std::string_view text, int* threads) {
  if (text == "max") {
    *threads = UsableThreads();
    return {};
  }
  return ReadNumber(text, 1, 1024, threads);
}

template <class T>
using ReadItem = std::function<Complaint(std::string_view, T*)>;

// Items of a list between commas; twice the same counts once.
template <class T>
Complaint ReadList(std::string_view text, const ReadItem<T>& read, std::vector<T>* list) {
  list->clear();
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    T item{};
    if (Complaint complaint = read(text.substr(begin, end - begin), &item); !complaint.empty()) return complaint;
    if constexpr (requires { item == item; }) {
      if (std::find(list->begin(), list->end(), item) != list->end()) {
        begin = end + 1;
        continue;
      }
    }
    list->push_back(std::move(item));
    begin = end + 1;
  }
  return {};
}

Complaint ReadFlag(std::string_view text, bool* flag) {
  *flag = true;
  return text.empty() ? Complaint() : "it takes no value, not '" + std::string(text) + "'";
}

struct OptionSpec {
  std::string_view name;
  std::string_view modes;  // between spaces; empty: all
  const char* hint;
  const char* help;
  std::function<Complaint(std::string_view, Options*)> read;
};

template <class T>
auto List(std::vector<T> Options::* member, ReadItem<T> read) {
  return
      [member, read](std::string_view text, Options* options) { return ReadList<T>(text, read, &(options->*member)); };
}

template <class T>
auto Numbers(std::vector<T> Options::* member, T min, T max) {
  return List<T>(member, [min, max](std::string_view text, T* value) { return ReadNumber(text, min, max, value); });
}

template <class T, class Table>
auto Names(std::vector<T> Options::* member, const Table& names) {
  return List<T>(member, [&names](std::string_view text, T* value) { return ReadName(names, text, value); });
}

template <class T>
auto One(std::vector<T> Options::* member, ReadItem<T> read) {
  return [member, read](std::string_view text, Options* options) {
    T item{};
    Complaint complaint = read(text, &item);
    (options->*member) = {item};
    return complaint;
  };
}

const std::vector<OptionSpec>& Specs() {
  constexpr int64_t kMaxTokens = int64_t{1} << 24;
  constexpr std::string_view kComputed = " decode fork prefill append scaling ";
  constexpr std::string_view kLayers = " decode fork prefill append scaling sessions storage rpc serve ";
  constexpr std::string_view kShaped = " decode fork prefill backward append scaling sessions storage rpc serve ";
  constexpr std::string_view kThreaded = " decode fork prefill backward append scaling rpc serve ";
  static const std::vector<OptionSpec> kSpecs = {
      {"--shape", kShaped, "=NAME,..", "layers of known models (below; llama3-8b)",
       List<ModelShape>(&Options::shapes, ReadShape)},
      {"--heads", kShaped, "=Q/KV", "a layer of other heads, with --head_dim",
       One<ModelShape>(&Options::heads, ReadHeads)},
      {"--head_dim", kShaped, "=D", "its head_dim (128)", Numbers<int>(&Options::head_dims, 1, kMaxHeadDim)},
      {"--kv", kLayers, "=TYPE,..", "types of the cache: f32, bf16, f16, int8 (f32)",
       Names<KvDType>(&Options::kvs, kKvNames)},
      {"--tokens", kShaped, "=N,..",
       "context of each sequence; prefill, backward: its new tokens (4096; sessions 32768)",
       Numbers<int64_t>(&Options::tokens, 1, kMaxTokens)},
      {"--history", " prefill backward scaling ", "=N,..",
       "prefill, backward: tokens that are there before the new ones (0)",
       Numbers<int64_t>(&Options::histories, 0, kMaxTokens)},
      {"--shared", " fork scaling ", "=N,..",
       "fork: tokens of the common prefix, in whole blocks (all but the last block)",
       Numbers<int64_t>(&Options::shared, 0, kMaxTokens)},
      {"--batch", " decode prefill backward fork scaling sessions serve ", "=N,..",
       "sequences that are computed together (1; fork 4); sessions: beams (4); serve: streams (64)",
       Numbers<int>(&Options::batches, 1, 1024)},
      {"--queries", " decode fork scaling ", "=N,..",
       "new tokens of each sequence: more than 1 is speculative decoding (1)", Numbers<int>(&Options::queries, 1, 64)},
      {"--step", " append ", "=N,..", "append: tokens at a time, a divisor or a multiple of 64 (64,1)",
       Numbers<int>(&Options::steps, 1, 4096)},
      {"--source", " append ", "=TYPE,..",
       "append: types of the caller's K and V: f32, bf16, f16 (f32 and the cache's own)",
       Names<DType>(&Options::sources, kSourceNames)},
      {"--of", " scaling ", "=MODE,..", "scaling: decode, prefill, fork (decode)",
       Names<std::string>(&Options::of, kOfNames)},
      {"--threads", kThreaded, "=N,..", "as many as this process may use: max (max); scaling: a row for each up to N",
       List<int>(&Options::threads, ReadThreads)},
      {"--resident", kComputed, "=WHERE,..",
       "memory: layers take turns over 1.5 GiB; cache: one layer again and again (memory; prefill cache)",
       Names<Residency>(&Options::residencies, kResidencyNames)},
      {"--layers", " decode fork prefill append scaling sessions storage ", "=N",
       "layers that take turns (as --resident needs); sessions: of each session (32); storage: of the session (8)",
       [](std::string_view text, Options* o) { return ReadNumber(text, 1, 1 << 20, &o->layers); }},
      {"--directory", " storage ", "=DIR", "storage: where files of twice the session's size are written (/tmp)",
       [](std::string_view text, Options* o) {
         o->directory = text;
         return text.empty() ? Complaint("it names no directory") : Complaint();
       }},
      {"--seconds", "", "=S", "of measurement for each row (2)",
       [](std::string_view text, Options* o) { return ReadNumber(text, 0.01, 3600.0, &o->seconds); }},
      {"--sweep", kComputed, "", "a table: what is not given takes several values",
       [](std::string_view text, Options* o) { return ReadFlag(text, &o->sweep); }},
      {"--list", " suite ", "", "suite: print its commands and run none",
       [](std::string_view text, Options* o) { return ReadFlag(text, &o->list); }},
      {"--json", "", "", "one object a row",
       [](std::string_view text, Options* o) { return ReadFlag(text, &o->json); }},
      {"--help", "", "", "this text", [](std::string_view text, Options* o) { return ReadFlag(text, &o->help); }},
  };
  return kSpecs;
}

bool AppliesTo(const OptionSpec& spec, std::string_view mode) {
  return spec.modes.empty() || spec.modes.find(" " + std::string(mode) + " ") != std::string_view::npos;
}

Complaint ReadOne(std::string_view mode, std::string_view name, std::string_view value, Options* options) {
  for (const OptionSpec& spec : Specs()) {
    if (name != spec.name) continue;
    return AppliesTo(spec, mode) ? spec.read(value, options) : "mode " + std::string(mode) + " has no such option";
  }
  return "there is no such option";
}

template <class T>
void Default(std::vector<T>* list, std::vector<T> values) {
  if (list->empty()) *list = std::move(values);
}

template <class Table, class T>
const char* NameOf(const Table& names, T value) {
  for (const auto& [name, meaning] : names) {
    if (meaning == value) return name.data();
  }
  return "?";
}

}  // namespace

const std::vector<ModelShape>& ModelShapes() {
  static const std::vector<ModelShape> kShapes = {
      {"llama3-8b", 32, 8, 128},  {"llama3-70b", 64, 8, 128}, {"gpt2", 12, 12, 64},
      {"smollm2-135m", 9, 3, 64}, {"qwen2-7b", 28, 4, 128},   {"gemma2-9b", 16, 8, 256},
  };
  return kShapes;
}

bool ParseOptions(std::string_view mode, const std::vector<std::string>& arguments, Options* options,
                  std::string* error) {
  for (const std::string& argument : arguments) {
    const size_t equals = std::min(argument.find('='), argument.size());
    const std::string name = argument.substr(0, equals);
    const std::string_view value = std::string_view(argument).substr(std::min(equals + 1, argument.size()));
    const Complaint complaint = ReadOne(mode, name, value, options);
    if (complaint.empty()) continue;
    *error = name + ": " + complaint;
    return false;
  }
  if (options->heads.empty() && !options->head_dims.empty()) {
    *error = "--head_dim: it goes with --heads; a --shape has its own";
    return false;
  }
  if (!options->heads.empty()) {
    ModelShape shape = options->heads[0];
    for (const int head_dim : options->head_dims.empty() ? std::vector<int>{128} : options->head_dims) {
      shape.head_dim = head_dim;
      shape.name =
          std::to_string(shape.num_q_heads) + "/" + std::to_string(shape.num_kv_heads) + "x" + std::to_string(head_dim);
      options->shapes.push_back(shape);
    }
  }
  return true;
}

Options WithDefaults(std::string_view mode, Options options) {
  Options& o = options;
  const bool prefill = mode == "prefill" || mode == "backward";
  if (o.sweep) {
    Default(&o.kvs, {KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8});
    if (prefill) {
      Default<int64_t>(&o.tokens, {128, 512, 2048, 8192, 16384});
    } else if (mode == "scaling") {
      Default<std::string>(&o.of, {"decode", "prefill"});
    } else {
      Default<int64_t>(&o.tokens, {128, 1024, 4096, 32768, 131072});
    }
    if (mode == "fork") Default(&o.batches, {2, 4, 8});
    if (mode == "decode") Default(&o.threads, {1, UsableThreads()});
    if (o.threads.size() == 2 && o.threads[0] == o.threads[1]) o.threads.pop_back();
  }
  Default(&o.shapes, {ModelShapes()[0]});
  Default(&o.kvs, {KvDType::kF32});
  const bool sessions = mode == "sessions";  // one thread's bookkeeping
  const bool storage = mode == "storage";
  if (sessions || storage) o.threads = {1}, o.layers = o.layers > 0 ? o.layers : sessions ? 32 : 8;
  Default<int64_t>(&o.tokens, {sessions ? 32768 : 4096});
  Default<int64_t>(&o.histories, {0});
  Default<int64_t>(&o.shared, {-1});
  Default(&o.batches, {mode == "fork" || sessions ? 4 : mode == "serve" ? 64 : 1});
  Default(&o.queries, {1});
  Default(&o.steps, {64, 1});
  Default(&o.threads, {UsableThreads()});
  Default(&o.residencies, {prefill ? Residency::kCache : Residency::kMemory});
  Default<std::string>(&o.of, {"decode"});
  return options;
}

std::string OptionsHelp() {
  std::string help;
  for (const OptionSpec& spec : Specs()) {
    std::string left = "  " + std::string(spec.name) + spec.hint;
    left.resize(std::max<size_t>(left.size() + 1, 22), ' ');
    help += left + spec.help + "\n";
  }
  help += "shapes (query heads/kv heads x head_dim):";
  for (const ModelShape& shape : ModelShapes()) {
    help += "\n  " + shape.name + " " + std::to_string(shape.num_q_heads) + "/" + std::to_string(shape.num_kv_heads) +
            " x " + std::to_string(shape.head_dim);
  }
  return help + "\n";
}

int UsableThreads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

const char* KvName(KvDType dtype) { return NameOf(kKvNames, dtype); }
const char* SourceName(DType dtype) { return NameOf(kSourceNames, dtype); }
const char* ResidencyName(Residency residency) { return NameOf(kResidencyNames, residency); }

}  // namespace attnd::bench

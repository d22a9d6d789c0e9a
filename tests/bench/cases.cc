#include "tests/bench/cases.h"

#include <algorithm>
#include <cstdio>

#include "kernels/block_layout.h"

namespace attnd::bench {
namespace {

// Five times the largest L3 that this project was measured on.
constexpr size_t kFromMemoryBytes = size_t{3} << 29;
// Everything that a row allocates.
constexpr size_t kMaxBytes = size_t{4} << 30;

int64_t BlocksOf(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

// What speaks against measuring the case; empty: nothing.
std::string Obstacle(const std::string& mode, const Case& c) {
  if (c.queries > c.context()) {
    return "--queries=" + std::to_string(c.queries) + " are more than the context's " + std::to_string(c.context());
  }
  if (c.shared > c.context()) {
    return "--shared=" + std::to_string(c.shared) + " is more than the context's " + std::to_string(c.context());
  }
  if (mode == "sessions") return {};  // its blocks are memory that nobody touches
  size_t bytes = LayerBytes(c) * LayerCount(c);
  const size_t token_floats = size_t{4} * c.shape.head_dim;
  if (mode == "append") {  // the rows to append
    bytes += 2 * token_floats * c.shape.num_kv_heads * c.tokens;
  } else {  // queries and output
    bytes += 2 * token_floats * c.shape.num_q_heads * c.queries * c.batch;
  }
  if (bytes > kMaxBytes) return "it would take " + std::to_string(bytes >> 20) + " MiB, more than 4 GiB";
  return {};
}

int64_t SharedTokens(const std::string& mode, int64_t asked, int64_t tokens) {
  if (mode != "fork") return 0;
  // A fork's own tokens begin in a block of its own.
  return asked < 0 ? (BlocksOf(tokens) - 1) * kBlockTokens : asked / kBlockTokens * kBlockTokens;
}

}  // namespace

int64_t LayerBlocks(const Case& c) {
  const int64_t shared = c.shared / kBlockTokens;
  return (shared + c.batch * (BlocksOf(c.context()) - shared)) * c.shape.num_kv_heads;
}

size_t LayerBytes(const Case& c) { return LayerBlocks(c) * BlockLayout(c.kv_shape()).block_bytes; }

int LayerCount(const Case& c) {
  if (c.layers > 0) return c.layers;
  if (c.residency == Residency::kCache) return 1;
  const size_t bytes = LayerBytes(c);
  return static_cast<int>((kFromMemoryBytes + bytes - 1) / bytes);
}

bool ForEachCase(const std::string& mode, const Options& options, const std::function<void(const Case&)>& run) {
  std::vector<Case> cases(1);
  cases[0].layers = options.layers;
  cases[0].seconds = options.seconds;
  cases[0].json = options.json;
  // Multiplies the cases by the values of one list.
  const auto with = [&cases](const auto& values, const auto& set) {
    std::vector<Case> all;
    for (const Case& c : cases) {
      for (const auto& value : values) set(&all.emplace_back(c), value);
    }
    cases = std::move(all);
  };
  with(options.shapes, [](Case* c, const ModelShape& shape) { c->shape = shape; });
  with(options.residencies, [](Case* c, Residency residency) { c->residency = residency; });
  with(options.batches, [](Case* c, int batch) { c->batch = batch; });
  with(options.histories, [](Case* c, int64_t history) { c->history = history; });
  with(options.tokens, [](Case* c, int64_t tokens) { c->tokens = tokens; });
  with(options.shared, [&](Case* c, int64_t shared) { c->shared = SharedTokens(mode, shared, c->tokens); });
  with(options.queries,
       [&](Case* c, int queries) { c->queries = mode == "prefill" || mode == "backward" ? c->tokens : queries; });
  with(options.kvs, [](Case* c, KvDType kv) { c->kv = kv; });
  with(options.threads, [](Case* c, int threads) { c->threads = threads; });
  bool all_measured = true;
  for (const Case& c : cases) {
    const std::string obstacle = Obstacle(mode, c);
    if (obstacle.empty()) {
      run(c);
      continue;
    }
    all_measured = false;
    std::fprintf(stderr, "attnd_bench: %s %s T=%lld batch=%d %s: %s\n", mode.c_str(), c.shape.name.c_str(),
                 static_cast<long long>(c.context()), c.batch, KvName(c.kv), obstacle.c_str());
  }
  return all_measured;
}

}  // namespace attnd::bench

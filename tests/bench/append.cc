// Append: K and V of new tokens into a layer's blocks, --step tokens at a time, beside a memcpy that moves as many
// bytes (those that append reads and those that it writes) between the same pieces of memory.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/append.h"
#include "tests/bench/layer.h"
#include "tests/bench/measure.h"
#include "tests/bench/modes.h"
#include "tests/bench/pool.h"
#include "tests/bench/report.h"

namespace attnd::bench {
namespace {

// The type that a caller's rows have when nothing needs to be converted; int8 has none.
std::vector<DType> SourcesOf(const Options& options, KvDType kv) {
  if (!options.sources.empty()) return options.sources;
  if (kv == KvDType::kBf16) return {DType::kF32, DType::kBf16};
  if (kv == KvDType::kF16) return {DType::kF32, DType::kF16};
  return {DType::kF32};
}

class AppendWorks {
 public:
  AppendWorks(const Case& c, Layers* layers, Pool* pool, DType source)
      : case_(c), layers_(layers), pool_(pool), source_(source) {
    // Zeros are as good as any: neither conversion nor memcpy looks at values.
    rows_.resize(2 * tensor_bytes());
  }

  DType source() const { return source_; }
  double bytes() const { return static_cast<double>(read_bytes() + written_bytes()); }

  // All of a layer's tokens, `step` at a time, in the engine's order: the heads of one block of tokens after the other.
  void Append(int step) {
    const int layer = layers_->Next(), heads = case_.shape.num_kv_heads;
    const int blocks = static_cast<int>((case_.tokens + kBlockTokens - 1) / kBlockTokens);
    if (step >= kBlockTokens) {
      pool_->Run(blocks * heads, [&](int task, int) {
        const int64_t token = int64_t{kBlockTokens} * (task / heads);
        Write(layer, task % heads, token, std::min(case_.tokens, token + kBlockTokens));
      });
      return;
    }
    // The engine gives a short step to one thread.
    pool_->Run(blocks, [&](int block, int) {
      const int64_t end = std::min(case_.tokens, int64_t{kBlockTokens} * (block + 1));
      for (int64_t token = int64_t{kBlockTokens} * block; token < end; token += step) {
        for (int head = 0; head < heads; ++head) Write(layer, head, token, std::min(end, token + step));
      }
    });
  }

  void Copy() {
    constexpr size_t kPart = size_t{64} << 10;
    const size_t count = (read_bytes() + written_bytes()) / 2;
    const size_t first = layers_->data(layers_->Next()) - layers_->data(0);
    pool_->Run(static_cast<int>((count + kPart - 1) / kPart), [&](int part, int) {
      const size_t begin = part * kPart;
      CopyAround(first + begin, begin, std::min(kPart, count - begin));
    });
  }

 private:
  size_t row_bytes() const {
    return static_cast<size_t>(case_.shape.num_kv_heads) * case_.shape.head_dim * DTypeBytes(source_);
  }
  size_t tensor_bytes() const { return case_.tokens * row_bytes(); }
  size_t read_bytes() const { return 2 * tensor_bytes(); }
  size_t written_bytes() const {
    return layers_->layout().block_bytes * case_.shape.num_kv_heads * case_.tokens / kBlockTokens;
  }

  // Where the two sides differ in size, the smaller one's end is followed by its beginning.
  void CopyAround(size_t to, size_t from, size_t bytes) {
    const size_t to_size = layers_->bytes() * layers_->count(), from_size = rows_.size();
    for (size_t now; bytes > 0; to += now, from += now, bytes -= now) {
      now = std::min({bytes, to_size - to % to_size, from_size - from % from_size});
      std::memcpy(layers_->data(0) + to % to_size, rows_.data() + from % from_size, now);
    }
  }

  // As the engine does it: a new block is initialised before its first token is written.
  void Write(int layer, int head, int64_t token, int64_t end) {
    const int slot = static_cast<int>(token % kBlockTokens);
    const int tokens = static_cast<int>(end - token);
    std::byte* const block = layers_->block(layer, 0, head, token / kBlockTokens);
    const std::byte* const k = rows_.data() + token * row_bytes() + head * case_.shape.head_dim * DTypeBytes(source_);
    if (slot == 0) InitBlock(layers_->layout(), block, tokens);
    WriteTokens(layers_->layout(), block, slot, tokens, {k, row_bytes(), source_},
                {k + tensor_bytes(), row_bytes(), source_});
  }

  const Case case_;
  Layers* const layers_;
  Pool* const pool_;
  const DType source_;
  std::vector<std::byte> rows_;  // K, then V: [tokens, num_kv_heads, head_dim]
};

void RunCase(const Options& options, const Case& c) {
  Layers layers(c);
  Pool pool(c.threads);
  for (const DType source : SourcesOf(options, c.kv)) {
    AppendWorks append(c, &layers, &pool, source);
    std::vector<std::function<void()>> works = {[&] { append.Copy(); }};
    for (const int step : options.steps) works.push_back([&append, step] { append.Append(step); });
    const std::vector<double> medians = MediansInterleaved(c.seconds, works);
    const double gigabytes = append.bytes() / 1e9;
    for (size_t i = 0; i < options.steps.size(); ++i) {
      Row row;
      row.name = "append/" + std::to_string(options.steps[i]);
      row.median_us = medians[i + 1] * 1e6;
      row.value = gigabytes / medians[i + 1];
      row.unit = "GB/s";
      row.roof = gigabytes / medians[0];
      row.bound = "copy";
      row.words = {{"source", SourceName(source)}};
      Print(c, row);
    }
  }
}

}  // namespace

int RunAppend(const Options& options) {
  for (const int step : options.steps) {
    if (step % kBlockTokens == 0 || kBlockTokens % step == 0) continue;
    std::fprintf(stderr, "attnd_bench: --step=%d: must divide %d or be a multiple of it\n", step, kBlockTokens);
    return 2;
  }
  PrintHeading(options.json);
  return ForEachCase("append", options, [&](const Case& c) { RunCase(options, c); }) ? 0 : 1;
}

}  // namespace attnd::bench

// Append: f32 K and V of new tokens into a layer's blocks, beside memcpy of as many bytes as the blocks take.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "kernels/append.h"
#include "tests/bench/layer.h"
#include "tests/bench/modes.h"
#include "tests/bench/report.h"

namespace attnd::bench {
namespace {

// All of a layer's tokens of one kv head, `step` tokens at a time.
void AppendHead(const Options& options, const Layers& layers, int layer, int head, int step, const float* rows) {
  const size_t row_bytes = static_cast<size_t>(options.shape.num_kv_heads) * options.shape.head_dim * sizeof(float);
  for (int64_t token = 0; token < options.tokens; token += step) {
    const int tokens = static_cast<int>(std::min<int64_t>(step, options.tokens - token));
    const std::byte* from =
        reinterpret_cast<const std::byte*>(rows + head * options.shape.head_dim) + token * row_bytes;
    const RowsView view{from, row_bytes, DType::kF32};
    WriteTokens(layers.layout(), layers.block(layer, head, token / kBlockTokens),
                static_cast<int>(token % kBlockTokens), tokens, view, view);
  }
}

}  // namespace

int RunAppend(const Options& options) {
  Pool pool(options.threads);
  Layers layers(options, options.layers);
  const std::vector<float> rows(options.tokens * options.shape.num_kv_heads * options.shape.head_dim, 1.0f);
  const size_t head_bytes = layers.bytes() / options.shape.num_kv_heads;
  int turn = 0;
  const auto next_layer = [&] { return turn++ % layers.count(); };
  const auto append = [&](int step) {
    const int layer = next_layer();
    pool.Run(options.shape.num_kv_heads,
             [&](int head, int) { AppendHead(options, layers, layer, head, step, rows.data()); });
  };
  const std::vector<std::byte> source(head_bytes, std::byte{1});
  const std::vector<double> medians =
      MediansInterleaved(options.seconds, {[&] { append(kBlockTokens); }, [&] { append(1); },
                                           [&] {
                                             const int layer = next_layer();
                                             pool.Run(options.shape.num_kv_heads, [&](int head, int) {
                                               std::memcpy(layers.block(layer, head, 0), source.data(), head_bytes);
                                             });
                                           }});
  const double bytes = static_cast<double>(layers.bytes());
  const double roof = bytes / medians[2] / 1e9;
  Print(options, {"append/64", medians[0] * 1e6, bytes / medians[0] / 1e9, "GB/s", roof});
  Print(options, {"append/1", medians[1] * 1e6, bytes / medians[1] / 1e9, "GB/s", roof});
  return 0;
}

}  // namespace attnd::bench

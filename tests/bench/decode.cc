// Decode: one token of one session against a layer's whole context. Layers take turns, so that K and V come from
// memory.
#include <algorithm>
#include <cstdio>

#include "kernels/attention.h"
#include "tests/bench/layer.h"
#include "tests/bench/modes.h"
#include "tests/bench/report.h"

namespace attnd::bench {

int RunDecode(const Options& options) {
  Pool pool(options.threads);
  Layers layers(options, options.layers);
  AttentionBatch batch(options.threads);
  MultiplyPeak peak(&pool, options.kv);
  int turn = 0;
  const auto next_layer = [&] { return turn++ % layers.count(); };
  const std::vector<double> medians = MediansInterleaved(
      options.seconds, {[&] {
                          batch.Clear();
                          batch.Add(layers.Work(next_layer(), 1));
                          pool.Run(batch.Plan(), [&](int task, int thread) { batch.Run(task, thread); });
                        },
                        [&] { ReadStream(&pool, layers.data(next_layer()), layers.bytes()); }, [&] { peak.Run(); }});
  // The roofline: no faster than the bytes can be read, nor than the products can be multiplied.
  const double bytes = static_cast<double>(layers.bytes());
  const double flops = 4.0 * options.shape.num_q_heads * options.shape.head_dim * options.tokens;
  const double best = std::max(medians[1], flops / (peak.flops() / medians[2]));
  Print(options, {"decode", medians[0] * 1e6, bytes / medians[0] / 1e9, "GB/s", bytes / best / 1e9});
  return 0;
}

}  // namespace attnd::bench

// Prefill: causal attention of all tokens of a layer at once.
#include <algorithm>

#include "kernels/attention.h"
#include "tests/bench/layer.h"
#include "tests/bench/modes.h"
#include "tests/bench/report.h"

namespace attnd::bench {

int RunPrefill(const Options& options) {
  Pool pool(options.threads);
  Layers layers(options, /*count=*/1);
  AttentionBatch batch(options.threads);
  MultiplyPeak peak(&pool, options.kv);
  const std::vector<double> medians = MediansInterleaved(
      options.seconds, {[&] {
                          batch.Clear();
                          batch.Add(layers.Work(0, options.tokens));
                          pool.Run(batch.Plan(), [&](int task, int thread) { batch.Run(task, thread); });
                        },
                        [&] { peak.Run(); }});
  // Each query multiplies with the keys up to its own, once for the scores and once for the values.
  const double pairs = 0.5 * static_cast<double>(options.tokens) * static_cast<double>(options.tokens + 1);
  const double flops = 4.0 * options.shape.num_q_heads * options.shape.head_dim * pairs;
  Print(options, {"prefill", medians[0] * 1e6, flops / medians[0] / 1e9, "GFLOP/s", peak.flops() / medians[1] / 1e9});
  return 0;
}

}  // namespace attnd::bench

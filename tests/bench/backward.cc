// Gradients of causal attention of all of a sequence's new tokens at once, after --history tokens that are there
// already.
#include "kernels/backward.h"

#include <memory>
#include <random>
#include <vector>

#include "tests/bench/measure.h"
#include "tests/bench/modes.h"
#include "tests/bench/multiply_peak.h"
#include "tests/bench/pool.h"
#include "tests/bench/report.h"

namespace attnd::bench {
namespace {

std::vector<float> Random(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& x : values) x = normal(random);
  return values;
}

BackwardTensor TensorOf(const std::vector<float>& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), DType::kF32};
}

// One sequence's tensors and gradients.
class Sequence {
 public:
  Sequence(const Case& c, unsigned seed)
      : q_(Random(c.tokens * c.shape.num_q_heads * c.shape.head_dim, seed)),
        k_(Random(c.context() * c.shape.num_kv_heads * c.shape.head_dim, seed + 1)),
        v_(Random(k_.size(), seed + 2)),
        d_out_(Random(q_.size(), seed + 3)),
        d_q_(q_.size()),
        d_k_(k_.size()),
        d_v_(v_.size()) {
    work_.heads = c.heads();
    work_.head_dim = work_.value_dim = c.shape.head_dim;
    work_.softmax.softmax_scale = 0.1f;
    work_.num_queries = c.tokens;
    work_.num_keys = c.context();
    work_.first_position = c.history;
    work_.q = TensorOf(q_);
    work_.k = TensorOf(k_);
    work_.v = TensorOf(v_);
    work_.d_out = TensorOf(d_out_);
    work_.d_q = d_q_.data();
    work_.d_k = d_k_.data();  // not zeroed from round to round: what is added up is no matter here
    work_.d_v = d_v_.data();
    memory_.resize(BackwardMemoryBytes(work_));
    UseMemory(memory_.data(), &work_);
  }
  Sequence(const Sequence&) = delete;
  const BackwardWork& work() const { return work_; }

 private:
  const std::vector<float> q_, k_, v_, d_out_;
  std::vector<float> d_q_, d_k_, d_v_;
  std::vector<std::byte> memory_;
  BackwardWork work_;
};

// Every query multiplies with the keys up to its own, five times: scores, D_P, D_V, D_Q and D_K. That three of these
// are in f64, and that scores and D_P are computed twice where a task is no whole kv head, counts nothing.
double Flops(const Case& c) {
  const double queries = static_cast<double>(c.queries), context = static_cast<double>(c.context());
  const double pairs = queries * context - 0.5 * queries * (queries - 1);
  return 10.0 * c.batch * c.shape.num_q_heads * c.shape.head_dim * pairs;
}

Row Measure(const Case& c) {
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (int i = 0; i < c.batch; ++i) sequences.push_back(std::make_unique<Sequence>(c, 4 * i));
  Pool pool(c.threads);
  BackwardBatch batch(c.threads);
  MultiplyPeak peak(&pool, KvDType::kF32);
  const auto differentiate = [&] {
    batch.Clear();
    for (const auto& sequence : sequences) {
      batch.Add(sequence->work(), 0, BackwardTiles(sequence->work(), c.tokens));
    }
    batch.Plan();
    for (int phase = 0; phase < BackwardBatch::kPhases; ++phase) {
      pool.Run(batch.num_tasks(phase), [&](int task, int) { batch.Run(phase, task); });
    }
  };
  const std::vector<double> medians = MediansInterleaved(c.seconds, {differentiate, [&] { peak.Run(); }});
  Row row;
  row.name = "backward";
  row.median_us = medians[0] * 1e6;
  row.value = Flops(c) / medians[0] / 1e9;
  row.unit = "GFLOP/s";
  row.roof = peak.flops() / medians[1] / 1e9;
  row.bound = "multiply";
  return row;
}

}  // namespace

int RunBackward(const Options& options) {
  PrintHeading(options.json);
  const bool all = ForEachCase("backward", options, [](const Case& c) { Print(c, Measure(c)); });
  return all ? 0 : 1;
}

}  // namespace attnd::bench

// Attention beside its two roofs: what modes decode, fork, prefill and scaling measure.
#ifndef ATTND_TESTS_BENCH_ATTEND_H_
#define ATTND_TESTS_BENCH_ATTEND_H_

#include <functional>
#include <vector>

#include "kernels/attention.h"
#include "tests/bench/cases.h"
#include "tests/bench/layer.h"
#include "tests/bench/multiply_peak.h"
#include "tests/bench/pool.h"
#include "tests/bench/report.h"

namespace attnd::bench {

// The roofline: nothing is done sooner than its bytes can be read, nor than its products can be multiplied.
struct Roofline {
  double seconds = 0;
  const char* bound = "";  // read or multiply
};

// A case on a number of threads.
class AttendWorks {
 public:
  // `layers` may be shared by several.
  AttendWorks(const Case& c, Layers* layers);

  // To be measured together: attention, reading the same bytes, multiplying.
  static constexpr int kWorks = 3;
  std::vector<std::function<void()>> works();

  // `medians` of the works, in their order. `flops_per_second`: the row is in GFLOP/s, or else in GB/s.
  Row MakeRow(const char* name, const double* medians, bool flops_per_second) const;
  Roofline RooflineOf(const double* medians) const;
  const Case& c() const { return case_; }

 private:
  void Attend();
  double bytes() const { return static_cast<double>(layers_->bytes()); }
  double flops() const;

  const Case case_;
  Layers* const layers_;
  Pool pool_;
  AttentionBatch batch_;
  MultiplyPeak peak_;
};

// The rows of a mode that measures one thing per case.
int RunAttend(const char* mode, const Options& options, bool flops_per_second);

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_ATTEND_H_

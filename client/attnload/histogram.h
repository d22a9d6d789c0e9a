// Counts of durations in buckets whose width grows with the value, as HdrHistogram's: quantiles of any number of
// samples in fixed memory, with a relative error that is bounded everywhere.
#ifndef ATTND_CLIENT_ATTNLOAD_HISTOGRAM_H_
#define ATTND_CLIENT_ATTNLOAD_HISTOGRAM_H_

#include <cstdint>
#include <vector>

#include "client/attnload/clock.h"

namespace attnd::attnload {

// Not thread-safe. Negative values count as 0.
class Histogram {
 public:
  // Each power of two is cut into 2^precision_bits buckets and a quantile is a bucket's middle, so it is off by at
  // most 2^-(precision_bits + 1) of itself: 0.2 % with 8, 1.6 % with 5.
  explicit Histogram(int precision_bits = 8) : precision_bits_(precision_bits) {}

  void Record(Nanos value);
  void Merge(const Histogram& other);  // REQUIRES: of the same precision

  int64_t count() const { return count_; }
  Nanos max() const { return max_; }  // exact
  Nanos min() const { return min_; }  // exact
  double MeanSeconds() const { return count_ == 0 ? 0 : sum_seconds_ / static_cast<double>(count_); }

  // The smallest value that at least the share `quantile` of all samples does not exceed; 0 without samples.
  Nanos Quantile(double quantile) const;

 private:
  size_t IndexOf(uint64_t value) const;
  uint64_t MiddleOf(size_t index) const;

  int precision_bits_;
  std::vector<uint32_t> counts_;  // as long as the largest value needs
  int64_t count_ = 0;
  Nanos max_{0};
  Nanos min_{0};
  double sum_seconds_ = 0;
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_HISTOGRAM_H_

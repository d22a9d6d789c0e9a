#include "client/attnload/histogram.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>

namespace attnd::attnload {

// Below 2^(bits + 1) every value has a bucket of its own. Above, a value of w bits keeps its bits + 1 leading ones:
// `shift` is how many are dropped, and each shift has 2^bits buckets.
size_t Histogram::IndexOf(uint64_t value) const {
  const int shift = std::max(0, static_cast<int>(std::bit_width(value)) - precision_bits_ - 1);
  return (static_cast<size_t>(shift) << precision_bits_) + static_cast<size_t>(value >> shift);
}

uint64_t Histogram::MiddleOf(size_t index) const {
  const size_t per_shift = size_t{1} << precision_bits_;
  if (index < 2 * per_shift) return index;
  const size_t shift = index / per_shift - 1;
  const uint64_t low = (index - shift * per_shift) << shift;
  return low + ((uint64_t{1} << shift) >> 1);
}

void Histogram::Record(Nanos value) {
  value = std::max(value, Nanos(0));
  const size_t index = IndexOf(static_cast<uint64_t>(value.count()));
  if (index >= counts_.size()) counts_.resize(index + 1);
  ++counts_[index];
  min_ = count_ == 0 ? value : std::min(min_, value);
  max_ = std::max(max_, value);
  ++count_;
  sum_seconds_ += ToSeconds(value);
}

void Histogram::Merge(const Histogram& other) {
  assert(precision_bits_ == other.precision_bits_);
  if (other.count_ == 0) return;
  if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
  for (size_t i = 0; i < other.counts_.size(); ++i) counts_[i] += other.counts_[i];
  min_ = count_ == 0 ? other.min_ : std::min(min_, other.min_);
  max_ = std::max(max_, other.max_);
  count_ += other.count_;
  sum_seconds_ += other.sum_seconds_;
}

Nanos Histogram::Quantile(double quantile) const {
  if (count_ == 0) return Nanos(0);
  const auto rank = static_cast<int64_t>(std::ceil(quantile * static_cast<double>(count_)));
  if (rank >= count_) return max_;
  int64_t seen = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    seen += counts_[i];
    if (seen >= rank && seen > 0) return std::clamp(Nanos(static_cast<int64_t>(MiddleOf(i))), min_, max_);
  }
  return max_;
}

}  // namespace attnd::attnload

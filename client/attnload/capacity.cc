#include "client/attnload/capacity.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace attnd::attnload {
namespace {

constexpr double kPrecision = 1.05;  // of the two bounds, to one another
constexpr int kMostHalvings = 10;    // of the first rate, before giving up

}  // namespace

absl::StatusOr<CapacityResult> FindCapacity(double first, double max,
                                            const std::function<absl::StatusOr<Trial>(double rate)>& trial) {
  CapacityResult result;
  double high = 0;  // the lowest that failed; 0: none yet
  int halvings = 0;
  for (double rate = std::min(first, max);;) {
    absl::StatusOr<Trial> made = trial(rate);
    if (!made.ok()) return made.status();
    made->rate = rate;
    const bool ok = made->ok;
    result.trials.push_back(*std::move(made));
    (ok ? result.rate : high) = rate;
    if (high == 0) {
      if (rate >= max) return result;
      rate = std::min(2 * rate, max);
    } else if (result.rate == 0) {
      if (++halvings > kMostHalvings) break;
      rate = rate / 2;
    } else {
      if (high / result.rate <= kPrecision) break;
      // In the middle by ratio, as the bounds may lie far apart.
      rate = std::sqrt(result.rate * high);
    }
  }
  result.bounded = true;
  return result;
}

}  // namespace attnd::attnload

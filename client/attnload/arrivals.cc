#include "client/attnload/arrivals.h"

#include <cassert>
#include <cmath>

#include "client/tool/random.h"

namespace attnd::attnload {

Arrivals::Arrivals(ArrivalKind kind, double rate, Nanos window, uint64_t seed)
    : kind_(kind), rate_(rate), window_(window), seed_(seed) {
  assert(rate > 0 && window > Nanos(0));
}

std::optional<Nanos> Arrivals::Next() {
  const double index = static_cast<double>(count_);
  switch (kind_) {
    case ArrivalKind::kPoisson:
      last_seconds_ -= std::log(1 - tool::Unit(tool::Hash({seed_, count_}))) / rate_;
      break;
    case ArrivalKind::kConstant:
      last_seconds_ = index / rate_;
      break;
    case ArrivalKind::kRamp:
      // By time t, rate / window * t^2 / 2 sessions have arrived; this is where that count reaches index + 1/2.
      last_seconds_ = std::sqrt(2 * (index + 0.5) * ToSeconds(window_) / rate_);
      break;
  }
  ++count_;
  const Nanos at(std::llround(last_seconds_ * 1e9));
  if (at >= window_) return std::nullopt;
  return at;
}

}  // namespace attnd::attnload

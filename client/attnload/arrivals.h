// When sessions arrive. The schedule is a function of its arguments alone: nothing that happens during the run delays,
// drops or bunches an arrival.
#ifndef ATTND_CLIENT_ATTNLOAD_ARRIVALS_H_
#define ATTND_CLIENT_ATTNLOAD_ARRIVALS_H_

#include <cstdint>
#include <optional>

#include "client/attnload/clock.h"

namespace attnd::attnload {

enum class ArrivalKind : uint8_t {
  kPoisson,   // independent of each other, `rate` on average
  kConstant,  // every 1/rate seconds, the first at 0
  kRamp,      // the rate grows evenly from 0 to `rate` over the window
};

// Gives the arrivals one after the other, in ascending order.
class Arrivals {
 public:
  // REQUIRES: rate > 0 (sessions per second), window > 0.
  Arrivals(ArrivalKind kind, double rate, Nanos window, uint64_t seed);

  // From the start of the run; nothing once the window is over.
  std::optional<Nanos> Next();

 private:
  ArrivalKind kind_;
  double rate_;
  Nanos window_;
  uint64_t seed_;
  uint64_t count_ = 0;
  double last_seconds_ = 0;
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_ARRIVALS_H_

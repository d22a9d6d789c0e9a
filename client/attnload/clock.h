// Time as attnload counts it: one monotonic clock for intended, sent and answered.
#ifndef ATTND_CLIENT_ATTNLOAD_CLOCK_H_
#define ATTND_CLIENT_ATTNLOAD_CLOCK_H_

#include <chrono>

#include "absl/time/time.h"

namespace attnd::attnload {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Nanos = std::chrono::nanoseconds;

inline Nanos ToNanos(absl::Duration duration) { return Nanos(absl::ToInt64Nanoseconds(duration)); }
inline double ToSeconds(Nanos nanos) { return static_cast<double>(nanos.count()) * 1e-9; }

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_CLOCK_H_

#include "tests/bench/measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace attnd::bench {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double SecondsOf(const std::function<void()>& work, int repeats) {
  const Clock::time_point start = Clock::now();
  for (int i = 0; i < repeats; ++i) work();
  return SecondsSince(start) / repeats;
}

double Median(std::vector<double>& values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

struct Timing {
  double estimate = 0;
  int repeats = 1;
  std::vector<double> seconds;
};

}  // namespace

std::vector<double> MediansInterleaved(double seconds, const std::vector<std::function<void()>>& works,
                                       const std::function<void(size_t)>& between) {
  constexpr double kMinSample = 0.5e-3;    // a clock reading and a thread's waking are little beside it
  constexpr double kPartOfLongest = 0.05;  // what is short beside another work is sampled for longer
  constexpr double kWarmBelow = 10e-3;     // a work so short feels what its predecessor left in the caches
  constexpr size_t kMinRounds = 3;
  std::vector<Timing> timings(works.size());
  double longest = 0;
  for (size_t i = 0; i < works.size(); ++i) {
    double& estimate = timings[i].estimate;
    estimate = SecondsOf(works[i], 1);  // warm-up: page tables, generated code, threads
    for (int again = 0; again < 2 && estimate < seconds / 10; ++again)
      estimate = std::min(estimate, SecondsOf(works[i], 1));
    if (between) between(i);
    longest = std::max(longest, estimate);
  }
  const double sample = std::max(kMinSample, std::min(kPartOfLongest * longest, 0.1 * seconds));
  for (Timing& t : timings) t.repeats = static_cast<int>(std::ceil(std::min(1e6, sample / std::max(1e-9, t.estimate))));
  const Clock::time_point start = Clock::now();
  while (timings[0].seconds.size() < kMinRounds || SecondsSince(start) < seconds) {
    for (size_t i = 0; i < works.size(); ++i) {
      if (timings[i].estimate < kWarmBelow) works[i]();
      timings[i].seconds.push_back(SecondsOf(works[i], timings[i].repeats));
      if (between) between(i);
    }
  }
  std::vector<double> medians;
  for (Timing& t : timings) medians.push_back(Median(t.seconds));
  return medians;
}

}  // namespace attnd::bench

// Medians of several works that take turns.
#ifndef ATTND_TESTS_BENCH_MEASURE_H_
#define ATTND_TESTS_BENCH_MEASURE_H_

#include <cstddef>
#include <functional>
#include <vector>

namespace attnd::bench {

// Seconds that each of `works` took, the median over rounds in which every work is timed once, one after the other:
// whatever else the machine does at the moment, it does to all of them. Takes about `seconds`, or three rounds.
// `between`, if given, is called outside of all timings, after every work's sample with that work's index: to put back
// what repeating the work changes.
std::vector<double> MediansInterleaved(double seconds, const std::vector<std::function<void()>>& works,
                                       const std::function<void(size_t work)>& between = {});

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_MEASURE_H_

// Rows of results, each with the roof that was measured in the same run.
#ifndef ATTND_TESTS_BENCH_REPORT_H_
#define ATTND_TESTS_BENCH_REPORT_H_

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "tests/bench/options.h"

namespace attnd::bench {

struct Row {
  std::string name;
  double median_us = 0;
  double value = 0;  // in `unit`
  const char* unit = "";
  double roof = 0;  // in `unit`: what the machine could do at best, measured in the same run
};

void Print(const Options& options, const Row& row);

// Seconds that each of `works` took, the median over rounds in which every work runs once, one after the other:
// whatever else the machine does at the moment, it does to all of them. Runs for about `seconds`.
std::vector<double> MediansInterleaved(double seconds, const std::vector<std::function<void()>>& works);

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_REPORT_H_

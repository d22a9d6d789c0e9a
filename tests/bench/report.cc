#include "tests/bench/report.h"

#include <algorithm>
#include <cstdio>

namespace attnd::bench {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsOf(const std::function<void()>& work) {
  const Clock::time_point start = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double Median(std::vector<double>& values) {
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

void Print(const Options& options, const Row& row) {
  const char* shape = options.shape.name;
  const char* kv = KvName(options.kv);
  const double ratio = row.roof > 0 ? row.value / row.roof : 0;
  if (options.json) {
    std::printf(
        "{\"name\": \"%s\", \"shape\": \"%s\", \"tokens\": %lld, \"kv\": \"%s\", \"threads\": %d, "
        "\"median_us\": %.2f, \"value\": %.3f, \"unit\": \"%s\", \"roof\": %.3f, \"ratio\": %.3f}\n",
        row.name.c_str(), shape, static_cast<long long>(options.tokens), kv, options.threads, row.median_us, row.value,
        row.unit, row.roof, ratio);
  } else {
    std::printf("%-12s %-14s T=%-6lld %-5s %2d threads  %10.1f us  %8.2f %-7s  roof %8.2f  ratio %.2f\n",
                row.name.c_str(), shape, static_cast<long long>(options.tokens), kv, options.threads, row.median_us,
                row.value, row.unit, row.roof, ratio);
  }
  std::fflush(stdout);
}

std::vector<double> MediansInterleaved(double seconds, const std::vector<std::function<void()>>& works) {
  constexpr size_t kMinRounds = 5;
  for (const auto& work : works) work();  // warm-up: page tables, generated code, threads
  std::vector<std::vector<double>> times(works.size());
  const Clock::time_point start = Clock::now();
  while (times[0].size() < kMinRounds || std::chrono::duration<double>(Clock::now() - start).count() < seconds) {
    for (size_t i = 0; i < works.size(); ++i) times[i].push_back(SecondsOf(works[i]));
  }
  std::vector<double> medians;
  for (std::vector<double>& of_work : times) medians.push_back(Median(of_work));
  return medians;
}

}  // namespace attnd::bench

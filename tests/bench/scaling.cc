// Scaling: the same work on 1, 2, ... threads, all of them and their roofs in turns, so that what an extra core brings
// is a ratio of one run.
#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/bench/attend.h"
#include "tests/bench/measure.h"
#include "tests/bench/modes.h"

namespace attnd::bench {
namespace {

void RunCase(const std::string& of, const Case& most) {
  Layers layers(most);
  std::vector<std::unique_ptr<AttendWorks>> counts;
  std::vector<std::function<void()>> works;
  for (int threads = 1; threads <= most.threads; ++threads) {
    Case c = most;
    c.threads = threads;
    counts.push_back(std::make_unique<AttendWorks>(c, &layers));
    for (auto& work : counts.back()->works()) works.push_back(std::move(work));
  }
  const std::vector<double> medians = MediansInterleaved(most.seconds * static_cast<double>(counts.size()), works);
  const Roofline one = counts[0]->RooflineOf(medians.data());
  for (size_t i = 0; i < counts.size(); ++i) {
    const double* const own = &medians[i * AttendWorks::kWorks];
    Row row = counts[i]->MakeRow(("scaling/" + of).c_str(), own, of == "prefill");
    row.numbers.emplace_back("speedup", medians[0] / own[0]);
    row.numbers.emplace_back("roof_speedup", one.seconds / counts[i]->RooflineOf(own).seconds);
    Print(counts[i]->c(), row);
  }
}

}  // namespace

int RunScaling(const Options& options) {
  PrintHeading(options.json);
  bool all = true;
  Options most = options;
  most.threads = {*std::max_element(options.threads.begin(), options.threads.end())};
  for (const std::string& of : options.of) {
    all = ForEachCase(of, most, [&](const Case& c) { RunCase(of, c); }) && all;
  }
  return all ? 0 : 1;
}

}  // namespace attnd::bench

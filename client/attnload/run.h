// One run from connecting to the verdict.
#ifndef ATTND_CLIENT_ATTNLOAD_RUN_H_
#define ATTND_CLIENT_ATTNLOAD_RUN_H_

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/attnload/load.h"
#include "client/attnload/options.h"
#include "client/attnload/scraper.h"
#include "client/cpp/types.h"

namespace attnd::attnload {

// One thing that was judged.
struct Finding {
  std::string name;
  bool ok;
  std::string text;  // with the numbers
};

struct RunReport {
  std::vector<std::pair<std::string, std::string>> config;  // the flags
  std::string target;
  std::string model;  // in words
  client::ServerInfo server;
  LoadOptions load;
  absl::Time started;
  double measured_seconds = 0;    // of the window; shorter than asked for when the run was stopped
  double client_cpu_seconds = 0;  // this process, from start to the last session's end
  double elapsed_seconds = 0;     // the same span
  bool stopped = false;
  Results results;
  std::vector<MetricSample> metrics;
  int64_t metric_failures = 0;
  std::vector<Finding> findings;
  std::vector<std::string> warnings;  // what to know before believing the figures

  bool ok() const;
};

// What the verdict is made by.
struct Objectives {
  double p99_seconds = 0;  // 0: none
  double error_rate = 0;
};
std::vector<Finding> Judge(const Objectives& objectives, const Results& results);
std::vector<std::string> Warn(const RunReport& report);

// The latency that --slo_p99 is about: that of decode steps, or of first outputs in runs without them.
const Histogram& ObjectiveLatency(const Results& results);
// Failed and rejected calls of all that ended.
double ErrorRate(const Results& results);

// Runs a load of `rate` sessions per second. `interrupted` ends it early when it becomes true. Errors: no server.
absl::StatusOr<RunReport> Run(const Flags& flags, double rate, bool quiet, const std::atomic<bool>& interrupted);

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_RUN_H_

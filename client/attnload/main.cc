// attnload: open-loop load on an attnd server.
#include <atomic>
#include <csignal>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/attnload/capacity.h"
#include "client/attnload/options.h"
#include "client/attnload/report.h"
#include "client/attnload/run.h"
#include "client/cpp/errors.h"

namespace attnd::attnload {
namespace {

constexpr int kDone = 0, kFailed = 1, kUsage = 2;

std::atomic<bool> interrupted = false;

// The first interrupt ends the run in an orderly way, with its report; the second ends the program.
void OnInterrupt(int signal) {
  interrupted = true;
  std::signal(signal, SIG_DFL);
}

int PrintError(const absl::Status& status, const std::string& target) {
  const std::string reason = client::GetErrorDetails(status).reason;
  std::cerr << "attnload: " << absl::StatusCodeToString(status.code());
  if (!reason.empty()) std::cerr << " (" << reason << ")";
  std::cerr << ": " << status.message() << "\n  the server was " << target << " (--target, ATTND_SERVER)\n";
  return kFailed;
}

Trial ToTrial(const RunReport& report) {
  Trial trial;
  trial.ok = report.ok() && !report.stopped;
  trial.p99_seconds = ToSeconds(ObjectiveLatency(report.results).Quantile(0.99));
  trial.error_rate = ErrorRate(report.results);
  trial.steps_per_second = static_cast<double>(report.results.measured_steps) / report.measured_seconds;
  for (const Finding& finding : report.findings) {
    if (!finding.ok) absl::StrAppend(&trial.why, trial.why.empty() ? "" : ", ", finding.name);
  }
  return trial;
}

// Leaves the report of the best trial, or of the last when none held. A wrong answer ends the search.
absl::StatusOr<CapacityResult> Search(const Flags& flags, std::optional<RunReport>* best) {
  return FindCapacity(flags.rate, flags.max_rate, [&](double rate) -> absl::StatusOr<Trial> {
    absl::StatusOr<RunReport> report = Run(flags, rate, /*quiet=*/false, interrupted);
    if (!report.ok()) return report.status();
    if (interrupted) return absl::CancelledError("the search was interrupted");
    const Trial trial = ToTrial(*report);
    std::cerr << absl::StreamFormat("%.4g sessions/s: p99 %.3f ms, %.2f%% errors, %.0f steps/s: %s\n", rate,
                                    trial.p99_seconds * 1e3, 100 * trial.error_rate, trial.steps_per_second,
                                    trial.ok ? "kept" : "missed: " + trial.why);
    if (report->results.checks.wrong > 0) {
      std::cerr << TextReport(*report);
      return absl::DataLossError("answers were wrong");
    }
    if (trial.ok || !best->has_value() || !(*best)->ok()) *best = *std::move(report);
    return trial;
  });
}

int Report(const Flags& flags, const RunReport& report, const CapacityResult* capacity) {
  const std::string json = JsonReport(report, capacity);
  if (flags.json != "-") {
    std::cout << TextReport(report);
    if (capacity != nullptr) std::cout << "\n" << CapacityTable(*capacity);
  }
  absl::Status status;
  if (!flags.json.empty()) status.Update(WriteFile(flags.json, json));
  if (!flags.report.empty()) status.Update(WriteFile(flags.report, HtmlReport(json)));
  if (!status.ok()) {
    std::cerr << "attnload: " << status.message() << "\n";
    return kFailed;
  }
  if (!report.ok()) {
    for (const Finding& finding : report.findings) {
      if (!finding.ok) std::cerr << "attnload: FAILED " << finding.name << ": " << finding.text << "\n";
    }
    return kFailed;
  }
  return kDone;
}

int Main(const std::vector<std::string>& arguments) {
  Flags flags;
  absl::Status status = flags.set().Parse(arguments, nullptr);
  if (status.ok() && flags.set().help_wanted()) {
    std::cout << flags.set().Help();
    return kDone;
  }
  if (status.ok()) status = flags.Check();
  if (!status.ok()) {
    std::cerr << "attnload: " << status.message() << " (--help lists what there is)\n";
    return kUsage;
  }
  std::signal(SIGINT, OnInterrupt);
  std::signal(SIGTERM, OnInterrupt);
  if (!flags.find_capacity) {
    absl::StatusOr<RunReport> report = Run(flags, flags.rate, /*quiet=*/false, interrupted);
    if (!report.ok()) return PrintError(report.status(), flags.target());
    return Report(flags, *report, nullptr);
  }
  std::optional<RunReport> best;
  absl::StatusOr<CapacityResult> capacity = Search(flags, &best);
  if (!capacity.ok()) return PrintError(capacity.status(), flags.target());
  return Report(flags, *best, &*capacity);
}

}  // namespace
}  // namespace attnd::attnload

int main(int argc, char** argv) { return attnd::attnload::Main({argv + 1, argv + argc}); }

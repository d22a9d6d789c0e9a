// What a run's figures mean.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "client/attnload/run.h"

namespace attnd::attnload {
namespace {

double Milliseconds(Nanos nanos) { return ToSeconds(nanos) * 1e3; }

// Answers of all kinds, of which so many failed, and so many were rejected.
struct Ends {
  int64_t ended = 0, failed = 0, rejected = 0;
};

Ends CountEnds(const Results& results) {
  Ends ends;
  for (const CallFigures& figures : results.calls) {
    ends.ended += figures.ended() - figures.cancelled;
    ends.failed += figures.failed;
    ends.rejected += figures.rejected.count();
  }
  return ends;
}

}  // namespace

bool RunReport::ok() const {
  return std::all_of(findings.begin(), findings.end(), [](const Finding& finding) { return finding.ok; });
}

const Histogram& ObjectiveLatency(const Results& results) {
  const Histogram& decode = results.of(CallKind::kDecode).latency;
  return decode.count() > 0 ? decode : results.first_output;
}

double ErrorRate(const Results& results) {
  const Ends ends = CountEnds(results);
  return ends.ended == 0 ? 0 : static_cast<double>(ends.failed + ends.rejected) / static_cast<double>(ends.ended);
}

std::vector<Finding> Judge(const Objectives& objectives, const Results& results) {
  std::vector<Finding> findings;
  const Ends ends = CountEnds(results);
  const int64_t answered = ends.ended - ends.failed - ends.rejected;
  findings.push_back(
      {"load", answered > 0 && ObjectiveLatency(results).count() > 0,
       absl::StrFormat("%d calls answered, %d outputs measured", answered, ObjectiveLatency(results).count())});
  const CheckFigures& checks = results.checks;
  const int64_t rows = checks.constant_rows + checks.reference_rows;
  findings.push_back({"answers", checks.wrong == 0 && (rows > 0 || answered == 0),
                      absl::StrFormat("%d rows equal to their session's constant, %d rows against float64, largest "
                                      "relative error %.2e, %d answers wrong",
                                      checks.constant_rows, checks.reference_rows, checks.max_error, checks.wrong)});
  const double rate = ErrorRate(results);
  findings.push_back(
      {"errors", rate <= objectives.error_rate,
       absl::StrFormat("%.3f%% of %d calls (%d failed, %d rejected), objective at most %.3g%%", 100 * rate, ends.ended,
                       ends.failed, ends.rejected, 100 * objectives.error_rate)});
  if (objectives.p99_seconds > 0) {
    const double p99 = ToSeconds(ObjectiveLatency(results).Quantile(0.99));
    const bool decode = results.of(CallKind::kDecode).latency.count() > 0;
    findings.push_back({"latency", ObjectiveLatency(results).count() > 0 && p99 <= objectives.p99_seconds,
                        absl::StrFormat("%s p99 %.3f ms, objective at most %.3f ms", decode ? "decode" : "first output",
                                        p99 * 1e3, objectives.p99_seconds * 1e3)});
  }
  return findings;
}

std::vector<std::string> Warn(const RunReport& report) {
  std::vector<std::string> warnings;
  const CallFigures& decode = report.results.of(CallKind::kDecode);
  const CallFigures& judged = decode.latency.count() > 0 ? decode : report.results.of(CallKind::kCreate);
  const Nanos wait = judged.client_wait.Quantile(0.99);
  if (wait > std::chrono::milliseconds(1) && 4 * wait > judged.latency.Quantile(0.99)) {
    warnings.push_back(absl::StrFormat(
        "calls waited up to %.3f ms (p99) inside attnload: more --connections, --streams, --threads, --max_sessions or "
        "another machine, or the latencies are attnload's own",
        Milliseconds(wait)));
  }
  if (report.measured_seconds < 10) {
    warnings.push_back(
        absl::StrFormat("measured for %.1f s only: high percentiles mean little below 10 s", report.measured_seconds));
  }
  if (report.results.checks.skipped > 0) {
    warnings.push_back(absl::StrFormat("%d answers chosen for float64 were not compared, because the check was busy",
                                       report.results.checks.skipped));
  }
  if (report.metric_failures > 0) {
    warnings.push_back(absl::StrFormat("the metrics page could not be read %d times", report.metric_failures));
  }
  if (report.stopped) warnings.push_back("the run was stopped before its time");
  return warnings;
}

}  // namespace attnd::attnload

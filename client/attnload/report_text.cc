#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/attnload/report.h"

namespace attnd::attnload {
namespace {

// Milliseconds with as many places as tell something.
std::string Ms(Nanos nanos) {
  const double ms = ToSeconds(nanos) * 1e3;
  return absl::StrFormat(ms < 10 ? "%.3f" : ms < 100 ? "%.2f" : "%.1f", ms);
}

void Row(const char* name, const Histogram& h, std::string* text) {
  if (h.count() == 0 || h.max() == Nanos(0)) return;
  absl::StrAppendFormat(text, "%-26s %9d", name, h.count());
  for (const NamedQuantile& q : kQuantiles) absl::StrAppendFormat(text, " %8s", Ms(h.Quantile(q.quantile)));
  absl::StrAppendFormat(text, " %8s %8s\n", Ms(h.max()), Ms(Nanos(static_cast<int64_t>(h.MeanSeconds() * 1e9))));
}

void Head(std::string* text) {
  absl::StrAppendFormat(text, "%-26s %9s", "milliseconds", "count");
  for (const NamedQuantile& q : kQuantiles) absl::StrAppendFormat(text, " %8s", q.name);
  absl::StrAppendFormat(text, " %8s %8s\n", "max", "mean");
}

void Calls(const Results& results, std::string* text) {
  Head(text);
  Row("first output", results.first_output, text);
  for (const CallKind kind : {CallKind::kDecode, CallKind::kPrefill, CallKind::kCreate, CallKind::kClose}) {
    const CallFigures& f = results.of(kind);
    const bool step = kind == CallKind::kDecode || kind == CallKind::kPrefill;
    Row(Name(kind), f.latency, text);
    Row("  dependency wait", f.dependency_wait, text);
    Row("  client wait", f.client_wait, text);
    Row("  service", f.service, text);
    if (step) {
      Row("    server: queue", f.queue, text);
      Row("    server: compute", f.compute, text);
      Row("    around the server", f.outside, text);
    }
    Row("  rejected, from sending", f.rejected, text);
  }
}

void Counts(const RunReport& report, std::string* text) {
  const Results& r = report.results;
  absl::StrAppendFormat(
      text, "sessions  %d arrived: %d completed, %d cut at the end, %d abandoned, %d failed; at most %d at once\n",
      r.sessions.arrived, r.sessions.completed, r.sessions.cut, r.sessions.abandoned, r.sessions.failed,
      r.sessions.most_at_once);
  if (report.measured_seconds > 0) {
    absl::StrAppendFormat(text, "answered  %.1f steps/s, %.1f tokens/s of one layer\n",
                          static_cast<double>(r.measured_steps) / report.measured_seconds,
                          static_cast<double>(r.measured_tokens) / report.measured_seconds);
  }
  const int64_t cancelled = r.of(CallKind::kDecode).cancelled + r.of(CallKind::kPrefill).cancelled;
  if (cancelled > 0) absl::StrAppendFormat(text, "cancelled %d steps, on purpose\n", cancelled);
  for (const auto& [name, count] : r.errors) absl::StrAppendFormat(text, "errors    %d x %s\n", count, name);
  absl::StrAppendFormat(text, "attnload  used %.2f cores\n", report.client_cpu_seconds / report.elapsed_seconds);
}

}  // namespace

std::string TextReport(const RunReport& report) {
  std::string text;
  absl::StrAppendFormat(&text, "server    %s: attnd %s, %s, oneDNN %s, %d compute threads\n", report.target,
                        report.server.version, report.server.isa, report.server.onednn_version,
                        report.server.compute_threads);
  const PlanOptions& plan = report.load.plan;
  absl::StrAppendFormat(&text, "load      %g sessions/s, each %d + %d tokens of %s\n", report.load.rate,
                        plan.prefill_tokens, plan.decode_tokens, report.model);
  absl::StrAppendFormat(&text, "measured  %.1f s after %.1f s of warm-up\n\n", report.measured_seconds,
                        ToSeconds(report.load.warmup));
  Calls(report.results, &text);
  text += '\n';
  Counts(report, &text);
  text += '\n';
  for (const std::string& mismatch : report.results.checks.mismatches) {
    absl::StrAppend(&text, "WRONG     ", mismatch, "\n");
  }
  for (const std::string& warning : report.warnings) absl::StrAppend(&text, "note      ", warning, "\n");
  for (const Finding& finding : report.findings) {
    absl::StrAppendFormat(&text, "%-9s %s: %s\n", finding.ok ? "ok" : "FAILED", finding.name, finding.text);
  }
  return text;
}

std::string CapacityTable(const CapacityResult& capacity) {
  std::string text =
      absl::StrFormat("%12s %10s %10s %12s  %s\n", "sessions/s", "p99 ms", "errors", "steps/s", "objectives");
  for (const Trial& t : capacity.trials) {
    absl::StrAppendFormat(&text, "%12.4g %10.3f %9.2f%% %12.1f  %s\n", t.rate, t.p99_seconds * 1e3, 100 * t.error_rate,
                          t.steps_per_second, t.ok ? "kept" : absl::StrCat("missed: ", t.why));
  }
  if (capacity.rate == 0) return text + "capacity  no rate that was tried keeps the objectives\n";
  return text + absl::StrFormat("capacity  %.4g sessions/s%s\n", capacity.rate,
                                capacity.bounded ? "" : " at least: the search ended at --max_rate");
}

}  // namespace attnd::attnload

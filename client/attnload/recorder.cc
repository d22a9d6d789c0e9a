#include "client/attnload/recorder.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "client/cpp/errors.h"

namespace attnd::attnload {
namespace {

constexpr size_t kMismatchesKept = 20;
// Seconds beyond this share the last line: a schedule of weeks must not fill the memory.
constexpr int64_t kMostSeconds = 86400;

}  // namespace

const char* Name(CallKind kind) {
  constexpr const char* kNames[] = {"create", "prefill", "decode", "close"};
  return kNames[static_cast<size_t>(kind)];
}

std::string ErrorName(const absl::Status& status) {
  const std::string reason = client::GetErrorDetails(status).reason;
  const std::string code = absl::StatusCodeToString(status.code());
  return reason.empty() ? code : absl::StrCat(code, " (", reason, ")");
}

Second& Recorder::SecondOf(TimePoint time) {
  const int64_t second =
      std::clamp<int64_t>(std::chrono::floor<std::chrono::seconds>(time - start_).count(), 0, kMostSeconds);
  if (second >= static_cast<int64_t>(results_.seconds.size())) results_.seconds.resize(second + 1);
  return results_.seconds[second];
}

void Recorder::Call(const CallRecord& r) {
  const Nanos service = r.answered - r.sent;
  const bool step = r.kind == CallKind::kPrefill || r.kind == CallKind::kDecode;
  const bool rejected = absl::IsResourceExhausted(r.status);
  std::lock_guard<std::mutex> lock(mutex_);
  const bool measured = Measured(r.intended);
  CallFigures& figures = results_.calls[static_cast<size_t>(r.kind)];
  Second& answered_in = SecondOf(r.answered);
  if (r.cancelled) {
    figures.cancelled += measured;
    return;
  }
  if (!r.status.ok()) {
    ++(rejected ? answered_in.rejected : answered_in.failed);
    if (!measured) return;
    ++results_.errors[ErrorName(r.status)];
    if (rejected) {
      figures.rejected.Record(service);
    } else {
      ++figures.failed;
    }
    return;
  }
  double& usual = usual_seconds_[static_cast<size_t>(r.kind)];
  usual = usual == 0 ? ToSeconds(service) : 0.95 * usual + 0.05 * ToSeconds(service);
  if (step) {
    ++answered_in.steps;
    answered_in.tokens += r.tokens;
    if (r.answered >= from_ && r.answered < end_) {
      ++results_.measured_steps;
      results_.measured_tokens += r.tokens;
    }
  }
  Second& intended_in = SecondOf(r.intended);
  if (r.kind == CallKind::kDecode) intended_in.step.Record(r.answered - r.intended);
  intended_in.client_wait.Record(r.sent - r.ready);
  if (!measured) return;
  figures.latency.Record(r.answered - r.intended);
  figures.dependency_wait.Record(r.ready - r.intended);
  figures.client_wait.Record(r.sent - r.ready);
  figures.service.Record(service);
  if (!step) return;
  figures.queue.Record(r.queue);
  figures.compute.Record(r.compute);
  figures.outside.Record(service - r.queue - r.compute);
}

void Recorder::FirstOutput(TimePoint intended, TimePoint answered) {
  std::lock_guard<std::mutex> lock(mutex_);
  Second& second = SecondOf(intended);
  second.first_output.Record(answered - intended);
  ++second.sessions;
  if (Measured(intended)) results_.first_output.Record(answered - intended);
}

void Recorder::Check(CheckKind kind, const std::string& session_id, int64_t session, const CheckOutcome& outcome) {
  std::lock_guard<std::mutex> lock(mutex_);
  CheckFigures& checks = results_.checks;
  (kind == CheckKind::kConstant ? checks.constant_rows : checks.reference_rows) += outcome.rows;
  checks.max_error = std::max(checks.max_error, outcome.max_error);
  if (outcome.mismatch.empty()) return;
  ++checks.wrong;
  if (checks.mismatches.size() >= kMismatchesKept) return;
  checks.mismatches.push_back(absl::StrCat("session ", session_id, " (number ", session, ", ",
                                           kind == CheckKind::kConstant ? "constant V" : "against float64",
                                           "): ", outcome.mismatch));
}

void Recorder::CheckSkipped() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++results_.checks.skipped;
}

void Recorder::EndAt(TimePoint end) {
  std::lock_guard<std::mutex> lock(mutex_);
  end_ = std::min(end_, end);
}

Nanos Recorder::Usual(CallKind kind) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return Nanos(static_cast<int64_t>(usual_seconds_[static_cast<size_t>(kind)] * 1e9));
}

Results Recorder::Get() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return results_;
}

Recorder::Glance Recorder::At(int64_t second) const {
  std::lock_guard<std::mutex> lock(mutex_);
  Glance glance;
  glance.wrong = results_.checks.wrong;
  for (const Second& s : results_.seconds) {
    glance.rejected += s.rejected;
    glance.failed += s.failed;
  }
  if (second < 0 || second >= static_cast<int64_t>(results_.seconds.size())) return glance;
  const Second& s = results_.seconds[second];
  glance.steps = s.steps;
  glance.tokens = s.tokens;
  const Histogram& latency = s.step.count() > 0 ? s.step : s.first_output;
  glance.p50 = latency.Quantile(0.5);
  glance.p99 = latency.Quantile(0.99);
  return glance;
}

}  // namespace attnd::attnload

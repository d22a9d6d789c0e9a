#include "client/attnload/session.h"

#include <algorithm>
#include <utility>

#include "client/cpp/errors.h"

namespace attnd::attnload {

Session::Session(Load* load, int64_t number, TimePoint arrival)
    : load_(load),
      plan_(load->options_.plan, number),
      arrival_(arrival),
      intended_(arrival),
      answered_before_(arrival) {}

void Session::Start() {
  load_->backend_->Create(plan_.session(), load_->options_.plan.config,
                          [self = shared_from_this()](absl::StatusOr<std::string> id, CallTimes times) {
                            self->load_->executor_->Now(
                                [self, id = std::move(id), times]() mutable { self->Created(std::move(id), times); });
                          });
}

void Session::Record(CallKind kind, const CallTimes& times, const absl::Status& status,
                     const client::StepResult* result) {
  CallRecord record;
  record.kind = kind;
  record.intended = intended_;
  record.ready = std::max(intended_, answered_before_);
  record.sent = std::max(record.ready, times.sent);
  record.answered = std::max(record.sent, times.answered);
  record.status = status;
  record.cancelled = step_cancels_ && absl::IsCancelled(status);
  if (kind == CallKind::kPrefill || kind == CallKind::kDecode) record.tokens = step_.tokens;
  if (result != nullptr) {
    record.queue = ToNanos(result->queue_time);
    record.compute = ToNanos(result->compute_time);
  }
  load_->recorder_.Call(record);
  answered_before_ = times.answered;
}

bool Session::Retry(const absl::Status& status, void (Session::*call)()) {
  if (!absl::IsResourceExhausted(status) || tries_ >= load_->options_.retries) return false;
  ++tries_;
  const absl::Duration delay = client::GetErrorDetails(status).retry_delay.value_or(absl::Milliseconds(100));
  // The intended time stays: whoever waits for the answer has waited since then.
  load_->executor_->At(answered_before_ + ToNanos(delay), [self = shared_from_this(), call] { (self.get()->*call)(); });
  return true;
}

void Session::Created(absl::StatusOr<std::string> id, CallTimes times) {
  Record(CallKind::kCreate, times, id.status(), nullptr);
  if (!id.ok()) {
    if (!Retry(id.status(), &Session::Start)) Finish(End::kFailed);
    return;
  }
  id_ = *std::move(id);
  PlanNextStep();
}

// A token passes all layers within its interval, so each of its steps has a part of the interval.
TimePoint Session::DecodeDue(int64_t decode_index) const {
  const Nanos interval = load_->options_.decode_interval;
  if (interval == Nanos(0)) return answered_before_;
  const int64_t layers = load_->options_.plan.config.num_layers;
  return decode_start_ + interval * (decode_index / layers) + interval * (decode_index % layers) / layers;
}

void Session::PlanNextStep() {
  tries_ = 0;
  was_cancelled_ = false;
  if (next_ == plan_.steps()) {
    intended_ = answered_before_;
    return Close(End::kCompleted);
  }
  step_ = plan_.StepAt(next_);
  intended_ = step_.prefill ? answered_before_ : DecodeDue(step_.decode_index);
  // A step that was intended before the end is sent, however late, and so is the prefill of who arrived before the end:
  // leaving them out would leave out the worst ones.
  if (step_.prefill ? load_->stopped() : intended_ >= load_->end()) {
    intended_ = answered_before_;
    return Close(End::kCut);
  }
  if (intended_ <= Clock::now()) return SendStep();
  load_->executor_->At(intended_, [self = shared_from_this()] { self->SendStep(); });
}

void Session::BuildRequest() {
  const client::SessionConfig& c = load_->options_.plan.config;
  const TensorPool& pool = *load_->pool_;
  const auto rows = [&](TensorKind kind, int64_t row) {
    return client::TensorView(pool.Rows(plan_.session(), step_.layer, kind, step_.position, step_.tokens, row));
  };
  request_ = {};
  request_.layer = step_.layer;
  // The position makes a repetition of the step, after a cancellation, rewrite the same place.
  request_.segments.push_back({.session_id = id_, .num_tokens = step_.tokens, .start_position = step_.position});
  request_.q = rows(TensorKind::kQ, int64_t{c.num_q_heads} * c.head_dim);
  request_.k = rows(TensorKind::kK, int64_t{c.num_kv_heads} * c.head_dim);
  if (plan_.check() == CheckKind::kConstant) {
    FillConstant(plan_, c, step_.layer, step_.tokens, &constant_v_);
    request_.v = constant_v_;
  } else {
    request_.v = rows(TensorKind::kV, int64_t{c.num_kv_heads} * c.value_dim_or_default());
  }
}

void Session::SendStep() {
  BuildRequest();
  step_abandons_ = plan_.abandon_at() == next_;
  step_cancels_ = step_abandons_ || (plan_.Cancels(next_) && !was_cancelled_);
  cancel_ = std::stop_source(step_cancels_ ? std::stop_source() : std::stop_source(std::nostopstate));
  const auto done = [self = shared_from_this()](absl::StatusOr<client::StepResult> result, CallTimes times) {
    // Shared, because a task has to be copyable and an answer is large.
    auto answer = std::make_shared<absl::StatusOr<client::StepResult>>(std::move(result));
    self->load_->executor_->Now([self, answer, times] { self->StepAnswered(std::move(*answer), times); });
  };
  load_->backend_->Step(plan_.session(), request_, /*unary=*/step_cancels_, cancel_.get_token(), done);
  if (step_cancels_) ArmCancel();
}

// Any time from at once to half as long again as such a step usually takes: before it arrives, in the queue, in
// compute, and sometimes too late.
void Session::ArmCancel() {
  const Nanos usual = load_->recorder_.Usual(step_.prefill ? CallKind::kPrefill : CallKind::kDecode);
  const double moment = 1.5 * plan_.CancelMoment(next_);
  const Nanos delay(static_cast<int64_t>(static_cast<double>(usual.count()) * moment));
  load_->executor_->At(Clock::now() + delay, [cancel = cancel_]() mutable { cancel.request_stop(); });
}

void Session::StepAnswered(absl::StatusOr<client::StepResult> result, CallTimes times) {
  const CallKind kind = step_.prefill ? CallKind::kPrefill : CallKind::kDecode;
  Record(kind, times, result.status(), result.ok() ? &*result : nullptr);
  if (result.ok()) CheckAnswer(std::move(result->out));
  if (step_abandons_) return Finish(End::kAbandoned);
  if (!result.ok()) return StepFailed(result.status());
  if (plan_.IsLastPrefill(next_)) {
    decode_start_ = times.answered;
    load_->recorder_.FirstOutput(arrival_, times.answered);
  }
  ++next_;
  PlanNextStep();
}

void Session::StepFailed(const absl::Status& status) {
  if (step_cancels_ && absl::IsCancelled(status)) {
    // The same step again, this time to its end. It is a new decision, so its time counts from here.
    was_cancelled_ = true;
    intended_ = answered_before_;
    return SendStep();
  }
  if (Retry(status, &Session::SendStep)) return;
  intended_ = answered_before_;
  Close(End::kFailed);
}

void Session::CheckAnswer(client::Tensor out) {
  if (plan_.check() == CheckKind::kConstant) {
    load_->recorder_.Check(CheckKind::kConstant, id_, plan_.session(),
                           CheckConstant(plan_, load_->options_.plan.config, step_, out));
  } else if (const std::optional<int> head = plan_.ReferenceHead(next_)) {
    load_->checker_.Add({plan_, id_, step_, *head, std::move(out)});
  }
}

void Session::Close(End end) {
  step_cancels_ = false;
  load_->backend_->Close(plan_.session(), id_,
                         [self = shared_from_this(), end](absl::StatusOr<bool> closed, CallTimes times) {
                           self->load_->executor_->Now([self, end, status = closed.status(), times] {
                             self->Record(CallKind::kClose, times, status, nullptr);
                             self->Finish(status.ok() ? end : End::kFailed);
                           });
                         });
}

void Session::Finish(End end) {
  load_->recorder_.Sessions([end](SessionFigures* sessions) {
    switch (end) {
      case End::kCompleted:
        ++sessions->completed;
        break;
      case End::kCut:
        ++sessions->cut;
        break;
      case End::kAbandoned:
        ++sessions->abandoned;
        break;
      case End::kFailed:
        ++sessions->failed;
        break;
    }
  });
  load_->SessionEnded();
}

}  // namespace attnd::attnload

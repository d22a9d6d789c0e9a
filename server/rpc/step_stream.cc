#include "server/rpc/step_stream.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <string>
#include <utility>

#include "server/engine/errors.h"
#include "server/rpc/status_map.h"
#include "server/rpc/step_task.h"
#include "server/rpc/unary_call.h"

namespace attnd {
namespace {

// The request_id of a StepRequest that is not taken in, by skipping the rest of it; 0 where there is none. Frees the
// bytes.
uint64_t TakeRequestId(grpc::ByteBuffer* bytes) {
  uint64_t id = 0;
  {
    grpc::ProtoBufferReader reader(bytes);
    google::protobuf::io::CodedInputStream in(&reader);
    const auto skip_field = [&in](uint32_t wire_type) {
      uint64_t number = 0;
      uint32_t size = 0;
      switch (wire_type) {
        case 0:
          return in.ReadVarint64(&number);
        case 1:
          return in.Skip(8);
        case 2:
          return in.ReadVarint32(&size) && in.Skip(static_cast<int>(size));
        case 5:
          return in.Skip(4);
        default:
          return false;
      }
    };
    while (const uint32_t tag = in.ReadTag()) {
      const bool is_id = tag == v1::StepRequest::kRequestIdFieldNumber << 3;
      if (is_id ? !in.ReadVarint64(&id) : !skip_field(tag & 7)) break;
    }
  }
  bytes->Clear();
  return id;
}

}  // namespace

StepStreamCall* StepStreamCall::Start(ServiceState* state, grpc::CallbackServerContext* context) {
  auto stream = std::make_shared<StepStreamCall>(state, context);
  {
    absl::MutexLock lock(&state->streams_mutex);
    state->streams.insert(stream);
  }
  // After the registration: a drain that begins in between is seen by one of the two.
  absl::Status status = Admit(*state, *context, /*served_while_draining=*/false);
  if (status.ok()) {
    status = state->admission.OpenStream();
    stream->admitted_ = status.ok();
  }
  if (!status.ok()) {
    state->observer->OnError(GetErrorDetails(status).reason);
    stream->End(status);
  } else {
    absl::MutexLock lock(&stream->mutex_);
    stream->Advance();
  }
  return stream.get();  // gRPC calls OnDone, which lets go of it, only after this returned
}

StepStreamCall::StepStreamCall(ServiceState* state, grpc::CallbackServerContext* context)
    : state_(state), context_(context) {
  scope_.emplace(&state->admission, state->observer, RpcMethod::kStepStream);
}

void StepStreamCall::BeginDrain() { End(Admission::DrainingError()); }

void StepStreamCall::End(const absl::Status& status) {
  const auto self = shared_from_this();  // the end may let go of this before the lock is released
  absl::MutexLock lock(&mutex_);
  if (ending_) return;
  ending_ = true;
  end_status_ = status;
  Advance();
}

void StepStreamCall::OnReadDone(bool ok) {
  if (!ok) {
    {
      absl::MutexLock lock(&mutex_);
      reading_ = false;
    }
    return End(absl::OkStatus());  // half-closed, or cancelled: then OnCancel says so
  }
  HandleMessage();
  const auto self = shared_from_this();
  absl::MutexLock lock(&mutex_);
  reading_ = false;
  Advance();
}

void StepStreamCall::HandleMessage() {
  auto step = std::make_unique<Step>();
  step->bytes = static_cast<int64_t>(incoming_.Length());
  // Before the message is parsed, which takes that much memory again.
  absl::Status admitted =
      state_->admission.draining() ? Admission::DrainingError() : state_->admission.Reserve(step->bytes);
  if (!admitted.ok()) {
    step->request.set_request_id(TakeRequestId(&incoming_));
  } else {
    step->reserved_bytes = step->bytes;
    if (absl::Status status = ParseMessage(&incoming_, &step->request); !status.ok()) {
      state_->admission.Release(step->reserved_bytes);
      state_->observer->OnError(GetErrorDetails(status).reason);
      return End(status);
    }
  }
  {
    absl::MutexLock lock(&mutex_);
    if (gone_) return state_->admission.Release(step->reserved_bytes);
    ++in_flight_;
    in_flight_bytes_ += step->bytes;
    state_->observer->OnRequestsInFlight(1);
  }
  Step* const raw = step.release();  // owned by the engine's completion, then by answers_
  if (admitted.ok()) admitted = Submit(raw);
  if (!admitted.ok()) Answer(raw, admitted);
}

absl::Status StepStreamCall::Submit(Step* step) {
  step->response.set_request_id(step->request.request_id());
  StepTask task;
  absl::Status status = PrepareStep(*state_->engine, step->request, state_->max_answer_bytes, &step->response, &task);
  if (!status.ok()) return status;
  task.deadline = DeadlineOf(*context_);
  task.cancel = cancel_;
  task.reserve_answer = [this, step](int64_t bytes) { return ReserveAnswer(step, bytes); };
  task.done = [this, step](StepOutcome outcome) {
    Answer(step, FillStepResponse(outcome, *state_->observer, &step->response));
  };
  state_->engine->Submit(std::move(task));
  return absl::OkStatus();
}

absl::Status StepStreamCall::ReserveAnswer(Step* step, int64_t bytes) {
  if (absl::Status status = state_->admission.Extend(step->reserved_bytes, bytes); !status.ok()) return status;
  step->reserved_bytes += bytes;
  absl::MutexLock lock(&mutex_);
  step->bytes += bytes;
  in_flight_bytes_ += bytes;
  return absl::OkStatus();
}

void StepStreamCall::Answer(Step* raw, const absl::Status& status) {
  std::unique_ptr<Step> step(raw);
  if (!status.ok()) {
    const std::string reason = GetErrorDetails(status).reason;
    if (!reason.empty()) state_->observer->OnError(reason);
    v1::StepResponse answer;
    answer.set_request_id(step->request.request_id());
    FillStepStatus(status, answer.mutable_status());
    step->response = std::move(answer);
  }
  step->answer = SerializeMessage(step->response);
  // Not Clear, which keeps the tensors' memory: the answer may wait long for its client to read.
  step->response = v1::StepResponse();
  step->request = v1::StepRequest();
  const auto self = shared_from_this();
  absl::MutexLock lock(&mutex_);
  if (gone_) {
    ForgetStep(std::move(step));
  } else {
    answers_.push_back(std::move(step));
  }
  Advance();
}

void StepStreamCall::OnWriteDone(bool ok) {
  const auto self = shared_from_this();
  absl::MutexLock lock(&mutex_);
  writing_ = false;
  ForgetStep(std::move(answers_.front()));
  answers_.pop_front();
  // A write fails only when the call is over: OnCancel says why, and drops what else is queued.
  if (!ok) ending_ = true;
  Advance();
}

void StepStreamCall::OnCancel() {
  cancel_->cancelled.store(true, std::memory_order_release);
  scope_->Handled(CancelCode(*context_));
  const auto self = shared_from_this();
  absl::MutexLock lock(&mutex_);
  state_->observer->OnRequestsInFlight(-in_flight_);
  gone_ = true;
  ending_ = true;
  while (answers_.size() > (writing_ ? 1u : 0u)) {
    ForgetStep(std::move(answers_.back()));
    answers_.pop_back();
  }
  Advance();
}

void StepStreamCall::ForgetStep(std::unique_ptr<Step> step) {
  --in_flight_;
  in_flight_bytes_ -= step->bytes;
  state_->admission.Release(step->reserved_bytes);
  if (!gone_) state_->observer->OnRequestsInFlight(-1);
}

void StepStreamCall::Advance() {
  if (finished_) return;
  if (!writing_ && !answers_.empty()) {
    writing_ = true;
    StartWrite(&answers_.front()->answer);
  }
  if (!reading_ && !ending_ && in_flight_ < kMaxInFlight && in_flight_bytes_ < state_->options.max_message_bytes) {
    reading_ = true;
    StartRead(&incoming_);
  }
  if (ending_ && in_flight_ == 0) {
    finished_ = true;
    Finish(ToGrpcStatus(end_status_));
  }
}

void StepStreamCall::OnDone() {
  const auto self = shared_from_this();
  {
    absl::MutexLock lock(&state_->streams_mutex);
    state_->streams.erase(self);
  }
  absl::MutexLock lock(&mutex_);
  // Counted here and not at the end's start: a read that failed looks like a half-close until OnCancel has run.
  scope_->Handled(context_->IsCancelled() ? CancelCode(*context_) : end_status_.code());
  if (admitted_) state_->admission.CloseStream();
  scope_.reset();  // last: from here on the service may be gone
}

}  // namespace attnd

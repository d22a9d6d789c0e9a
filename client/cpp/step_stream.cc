#include "client/cpp/step_stream.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/internal/convert.h"
#include "client/cpp/internal/status.h"
#include "client/cpp/internal/stream.h"

namespace attnd::client {
namespace {

StepStreamOptions Sanitised(StepStreamOptions options, const internal::Transport& transport) {
  options.window = std::max(options.window, 1);
  options.step_timeout = transport.TimeoutOr(options.step_timeout);
  return options;
}

// The step's own error, or its one segment's.
absl::StatusOr<StepResult> ToResult(v1::StepResponse&& response) {
  absl::Status status = internal::ExplainLostSession(internal::FromWire(response.status()));
  if (!status.ok()) return status;
  absl::StatusOr<StepResult> result = internal::FromWire(std::move(response));
  if (result.ok() && result->segments.size() == 1 && !result->segments[0].status.ok()) {
    return result->segments[0].status;
  }
  return result;
}

}  // namespace

// ---- the reactor

StepStream::Impl::Impl(std::shared_ptr<internal::Transport> transport, const StepStreamOptions& options)
    : transport_(std::move(transport)), options_(Sanitised(options, *transport_)) {}

std::unique_ptr<StepStream::Impl> StepStream::Impl::Open(std::shared_ptr<internal::Transport> transport,
                                                         const StepStreamOptions& options) {
  std::unique_ptr<Impl> impl(new Impl(std::move(transport), options));
  // The stream as a whole may live for days, so it has no deadline of its own: every wait on it has one instead.
  impl->transport_->Prepare(impl->context_);
  impl->transport_->stub().async()->StepStream(&impl->context_, impl.get());
  // Held until the half-close, because writes start from outside of the callbacks.
  impl->AddHold();
  impl->StartRead(&impl->reading_);
  impl->StartCall();
  return impl;
}

StepStream::Impl::NextWrite StepStream::Impl::PrepareWrite() {
  if (write_pending_ || half_close_sent_) return NextWrite::kNothing;
  if (!queue_.empty() && !ended_) {
    writing_ = std::move(queue_.front());
    queue_.pop_front();
    write_pending_ = true;
    auto promise = promises_.find(writing_.request_id());
    if (promise != promises_.end()) promise->second.sent = std::chrono::steady_clock::now();
    return NextWrite::kRequest;
  }
  if (!half_closed_ && !ended_) return NextWrite::kNothing;
  half_close_sent_ = true;
  return NextWrite::kHalfClose;
}

void StepStream::Impl::StartNext(NextWrite next) {
  if (next == NextWrite::kRequest) StartWrite(&writing_);
  if (next == NextWrite::kHalfClose) {
    StartWritesDone();
    RemoveHold();
  }
}

void StepStream::Impl::OnReadDone(bool ok) {
  // Not ok: the server ended the stream, or it broke. The hold must go for OnDone to come, so nothing is written any
  // more.
  if (!ok) {
    NextWrite next;
    {
      absl::MutexLock lock(&mutex_);
      half_closed_ = true;
      queue_.clear();
      next = PrepareWrite();
    }
    StartNext(next);
    return;
  }
  const uint64_t id = reading_.request_id();
  absl::StatusOr<StepResult> result = ToResult(std::move(reading_));
  Promise promise;
  {
    absl::MutexLock lock(&mutex_);
    auto promised = promises_.find(id);
    if (promised != promises_.end()) {
      promise = std::move(promised->second);
      promises_.erase(promised);
      in_flight_.erase(id);
    } else if (in_flight_.erase(id) == 1) {
      answers_.insert_or_assign(id, std::move(result));
    }
  }
  if (promise.done) promise.done(std::move(result), promise.sent);
  reading_.Clear();
  StartRead(&reading_);
}

void StepStream::Impl::OnWriteDone(bool ok) {
  NextWrite next;
  {
    absl::MutexLock lock(&mutex_);
    write_pending_ = false;
    if (!ok) {  // The stream is broken; OnDone says why.
      half_closed_ = true;
      queue_.clear();
    }
    next = PrepareWrite();
  }
  StartNext(next);
}

void StepStream::Impl::OnDone(const grpc::Status& status) {
  std::vector<Promise> broken;
  absl::Status lost;
  {
    absl::MutexLock lock(&mutex_);
    broken = EndLocked(internal::FromGrpc(status));
    lost = LostLocked();
  }
  BreakAll(std::move(broken), lost);
  done_.Notify();  // the object may be gone from here on
}

std::vector<StepStream::Impl::Promise> StepStream::Impl::EndLocked(const absl::Status& status) {
  if (!ended_) final_ = status;
  ended_ = true;
  std::vector<Promise> broken;
  for (auto& [id, promise] : promises_) {
    in_flight_.erase(id);
    broken.push_back(std::move(promise));
  }
  promises_.clear();
  for (uint64_t id : in_flight_) answers_.insert_or_assign(id, LostLocked());
  in_flight_.clear();
  queue_.clear();
  return broken;
}

// An OK end with steps unanswered is a server that dropped them.
absl::Status StepStream::Impl::LostLocked() const {
  return final_.ok() ? absl::UnavailableError("the stream ended before this step's answer") : final_;
}

void StepStream::Impl::BreakAll(std::vector<Promise> promises, const absl::Status& status) {
  for (Promise& promise : promises) promise.done(status, promise.sent);
}

void StepStream::Impl::Cancel(const absl::Status& status) {
  NextWrite next;
  std::vector<Promise> broken;
  absl::Status lost;
  {
    absl::MutexLock lock(&mutex_);
    broken = EndLocked(status);
    lost = LostLocked();
    half_closed_ = true;
    next = PrepareWrite();
  }
  context_.TryCancel();
  StartNext(next);
  BreakAll(std::move(broken), lost);
}

absl::StatusOr<uint64_t> StepStream::Impl::Send(const StepRequest& request) {
  v1::StepRequest wire;
  internal::ToWire(request, &wire);
  absl::Status size = transport_->CheckSize(wire);
  if (!size.ok()) return size;
  uint64_t id = 0;
  bool room = false;
  NextWrite next = NextWrite::kNothing;
  {
    absl::MutexLock lock(&mutex_);
    room = mutex_.AwaitWithTimeout(absl::Condition(this, &Impl::HasRoom), options_.step_timeout);
    if (ended_) return final_.ok() ? absl::UnavailableError("the stream has ended") : final_;
    if (half_closed_) return absl::FailedPreconditionError("Send after the stream was finished or ended");
    if (room) {
      id = next_id_++;
      wire.set_request_id(id);
      in_flight_.insert(id);
      queue_.push_back(std::move(wire));
      next = PrepareWrite();
    }
  }
  StartNext(next);
  if (room) return id;
  absl::Status late = absl::DeadlineExceededError(absl::StrCat(
      "no room in the window of ", options_.window, " steps within ", absl::FormatDuration(options_.step_timeout)));
  Cancel(late);
  return late;
}

void StepStream::Impl::SendAsync(const StepRequest& request, Done done) {
  v1::StepRequest wire;
  internal::ToWire(request, &wire);
  absl::Status refused = transport_->CheckSize(wire);
  NextWrite next = NextWrite::kNothing;
  if (refused.ok()) {
    absl::MutexLock lock(&mutex_);
    if (ended_) {
      refused = final_.ok() ? absl::UnavailableError("the stream has ended") : final_;
    } else if (half_closed_) {
      refused = absl::FailedPreconditionError("SendAsync after the stream was finished or ended");
    } else {
      const uint64_t id = next_id_++;
      wire.set_request_id(id);
      in_flight_.insert(id);
      promises_[id].done = std::move(done);
      queue_.push_back(std::move(wire));
      next = PrepareWrite();
    }
  }
  StartNext(next);
  if (!refused.ok()) done(refused, {});
}

absl::StatusOr<StepResult> StepStream::Impl::Wait(uint64_t request_id) {
  {
    absl::MutexLock lock(&mutex_);
    auto answered = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !in_flight_.contains(request_id); };
    if (mutex_.AwaitWithTimeout(absl::Condition(&answered), options_.step_timeout)) {
      auto answer = answers_.find(request_id);
      if (answer == answers_.end()) {
        return absl::NotFoundError(absl::StrCat("no step ", request_id, " on this stream waits to be claimed"));
      }
      absl::StatusOr<StepResult> result = std::move(answer->second);
      answers_.erase(answer);
      return result;
    }
  }
  absl::Status late = absl::DeadlineExceededError(
      absl::StrCat("no answer to step ", request_id, " within ", absl::FormatDuration(options_.step_timeout)));
  Cancel(late);
  absl::MutexLock lock(&mutex_);
  answers_.erase(request_id);
  return late;
}

absl::Status StepStream::Impl::Finish() {
  NextWrite next;
  {
    absl::MutexLock lock(&mutex_);
    half_closed_ = true;
    next = PrepareWrite();
  }
  StartNext(next);
  {
    absl::MutexLock lock(&mutex_);
    if (mutex_.AwaitWithTimeout(absl::Condition(&ended_), options_.step_timeout)) return final_;
  }
  absl::Status late = absl::DeadlineExceededError(
      absl::StrCat("the server did not end the stream within ", absl::FormatDuration(options_.step_timeout)));
  Cancel(late);
  return late;
}

// ---- the handle

StepStream::StepStream(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

StepStream::~StepStream() {
  impl_->Cancel(absl::CancelledError("the stream was destroyed"));
  impl_->WaitDone();  // soon: a cancelled call ends without the server's help
}

absl::StatusOr<uint64_t> StepStream::Send(const StepRequest& request) { return impl_->Send(request); }
absl::StatusOr<StepResult> StepStream::Wait(uint64_t request_id) { return impl_->Wait(request_id); }
void StepStream::SendAsync(const StepRequest& request, Done done) { impl_->SendAsync(request, std::move(done)); }
bool StepStream::open() const { return impl_->open(); }
absl::Status StepStream::Finish() { return impl_->Finish(); }
void StepStream::Cancel() { impl_->Cancel(absl::CancelledError("the stream was cancelled")); }

}  // namespace attnd::client

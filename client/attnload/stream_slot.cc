#include "client/attnload/stream_slot.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace attnd::attnload {

struct StreamSlot::Open {
  std::mutex mutex;
  uint64_t next = 0;
  std::map<uint64_t, TimePoint> in_flight;  // since when; the oldest first
  bool timed_out = false;
  // Last, so that it goes first: its end waits for callbacks that use the rest.
  std::unique_ptr<client::StepStream> stream;
};

StreamSlot::StreamSlot(const Client& client, Executor* executor, int64_t limit)
    : client_(client), executor_(executor), gate_(executor, limit) {}

StreamSlot::~StreamSlot() = default;

std::shared_ptr<StreamSlot::Open> StreamSlot::Current() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (open_ != nullptr && open_->stream->open()) return open_;
  // A stream's end may wait for its last callbacks: not here.
  if (open_ != nullptr) executor_->Now([old = std::move(open_)] {});
  open_ = std::make_shared<Open>();
  open_->stream = client_.OpenStepStream();
  Watch(executor_, open_, ToNanos(client_.options().default_timeout));
  return open_;
}

void StreamSlot::Watch(Executor* executor, std::weak_ptr<Open> weak, Nanos timeout) {
  const Nanos pause = std::clamp<Nanos>(timeout / 10, std::chrono::milliseconds(5), std::chrono::milliseconds(100));
  executor->At(Clock::now() + pause, [executor, weak, timeout] {
    const std::shared_ptr<Open> open = weak.lock();
    if (open == nullptr || !open->stream->open()) return;
    bool late = false;
    {
      std::lock_guard<std::mutex> lock(open->mutex);
      late = !open->in_flight.empty() && Clock::now() - open->in_flight.begin()->second > timeout;
      open->timed_out = open->timed_out || late;
    }
    if (late) return open->stream->Cancel();
    Watch(executor, weak, timeout);
  });
}

void StreamSlot::Step(const client::StepRequest& request, Backend::Done<client::StepResult> done) {
  gate_.Enter([this, &request, done = std::move(done)] {
    const std::shared_ptr<Open> open = Current();
    const TimePoint given = Clock::now();
    uint64_t id = 0;
    {
      std::lock_guard<std::mutex> lock(open->mutex);
      id = open->next++;
      open->in_flight[id] = given;
    }
    // The plain pointer: the stream does not end before its callbacks have, and one of them may not be what ends it.
    open->stream->SendAsync(
        request, [this, open = open.get(), id, given, done](absl::StatusOr<client::StepResult> result, TimePoint sent) {
          CallTimes times = {sent, Clock::now()};
          if (times.sent == TimePoint()) times.sent = given;
          bool timed_out = false;
          {
            std::lock_guard<std::mutex> lock(open->mutex);
            open->in_flight.erase(id);
            timed_out = open->timed_out;
          }
          if (timed_out && absl::IsCancelled(result.status())) {
            result = absl::DeadlineExceededError("the stream was given up because a step on it had no answer in time");
          }
          gate_.Leave();
          done(std::move(result), times);
        });
  });
}

}  // namespace attnd::attnload

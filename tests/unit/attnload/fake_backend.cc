#include "tests/unit/attnload/fake_backend.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace attnd::attnload {

FakeBackend::FakeBackend(Nanos service_time) : service_time_(service_time), thread_([this] { Serve(); }) {}

FakeBackend::~FakeBackend() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void FakeBackend::StallAt(TimePoint from, Nanos how_long) {
  std::lock_guard<std::mutex> lock(mutex_);
  stall_from_ = from;
  stall_until_ = from + how_long;
}

void FakeBackend::Enqueue(std::function<void()> serve) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(serve));
  }
  wake_.notify_one();
}

void FakeBackend::Serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    std::function<void()> serve = std::move(queue_.front());
    queue_.pop_front();
    const TimePoint now = Clock::now();
    const TimePoint begin = now >= stall_from_ && now < stall_until_ ? stall_until_ : now;
    lock.unlock();
    std::this_thread::sleep_until(begin + service_time_);
    serve();
    lock.lock();
  }
}

void FakeBackend::Create(int64_t session, const client::SessionConfig& config, Done<std::string> done) {
  const TimePoint sent = Clock::now();
  Enqueue([this, session, config, sent, done = std::move(done)] {
    const std::string id = absl::StrCat("fake-", session);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      sessions_[id] = config;
    }
    done(id, {sent, Clock::now()});
  });
}

// V is constant in each head, so any row of V is the answer.
absl::StatusOr<client::StepResult> FakeBackend::Answer(const client::StepRequest& request,
                                                       const std::stop_token& cancel) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (cancel.stop_requested()) return absl::CancelledError("cancelled");
  const client::Segment& segment = request.segments[0];
  const client::SessionConfig& c = sessions_.at(segment.session_id);
  ++steps_;
  if (reject_every != 0 && steps_ % reject_every == 0) return absl::ResourceExhaustedError("the queue is full");
  int64_t& length = lengths_[{segment.session_id, request.layer}];
  const int64_t end = *segment.start_position + segment.num_tokens;
  bad_positions_ += *segment.start_position != length && end != length;
  length = end;
  client::StepResult result;
  result.queue_time = absl::Microseconds(3);
  const auto dim = static_cast<size_t>(c.value_dim_or_default());
  result.out.data.resize(4 * dim * static_cast<size_t>(c.num_q_heads * segment.num_tokens));
  auto* out = reinterpret_cast<float*>(result.out.data.data());
  const auto* v = static_cast<const float*>(request.v.data());
  for (int64_t row = 0; row < segment.num_tokens * c.num_q_heads; ++row) {
    const int64_t kv_head = row % c.num_q_heads / (c.num_q_heads / c.num_kv_heads);
    std::memcpy(out + row * dim, v + kv_head * dim, 4 * dim);
  }
  if (corrupt_every != 0 && steps_ % corrupt_every == 0) out[dim - 1] += 0.5f;
  return result;
}

void FakeBackend::Step(int64_t /*session*/, const client::StepRequest& request, bool unary, std::stop_token cancel,
                       Done<client::StepResult> done) {
  const TimePoint sent = Clock::now();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    streamed_ += !unary;
  }
  Enqueue([this, &request, cancel = std::move(cancel), sent, done = std::move(done)] {
    absl::StatusOr<client::StepResult> result = Answer(request, cancel);
    done(std::move(result), {sent, Clock::now()});
  });
}

void FakeBackend::Close(int64_t /*session*/, const std::string& session_id, Done<bool> done) {
  const TimePoint sent = Clock::now();
  Enqueue([this, session_id, sent, done = std::move(done)] {
    bool was_open = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      was_open = sessions_.erase(session_id) == 1;
    }
    done(was_open, {sent, Clock::now()});
  });
}

int64_t FakeBackend::open_sessions() {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(sessions_.size());
}

int64_t FakeBackend::bad_positions() {
  std::lock_guard<std::mutex> lock(mutex_);
  return bad_positions_;
}

int64_t FakeBackend::streamed() {
  std::lock_guard<std::mutex> lock(mutex_);
  return streamed_;
}

}  // namespace attnd::attnload

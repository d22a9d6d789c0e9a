#include "client/attnload/load.h"

#include <algorithm>

#include "client/attnload/session.h"

namespace attnd::attnload {
namespace {

// Room for the first tasks to be in place before the first is due.
constexpr Nanos kHeadStart = std::chrono::milliseconds(20);

int64_t SinceEpoch(TimePoint time) { return time.time_since_epoch().count(); }

}  // namespace

Load::Load(const LoadOptions& options, const TensorPool* pool, Backend* backend, Executor* executor)
    : options_(options),
      pool_(pool),
      backend_(backend),
      executor_(executor),
      start_(Clock::now() + kHeadStart),
      end_(SinceEpoch(start_ + options.warmup + options.duration)),
      recorder_(start_, start_ + options.warmup, end()),
      checker_(options.plan.config, pool, &recorder_),
      arrivals_(options.arrivals, options.rate, options.warmup + options.duration, options.plan.seed) {}

Load::~Load() = default;

void Load::Start() { NextArrival(); }

// Each arrival brings in the next one by its own time, so a late one makes its followers no later.
void Load::NextArrival() {
  std::unique_lock<std::mutex> lock(mutex_);
  const std::optional<Nanos> at = arriving_ ? arrivals_.Next() : std::nullopt;
  if (!at) {
    arriving_ = false;
    idle_.notify_all();
    return;
  }
  const int64_t number = next_number_++;
  lock.unlock();
  executor_->At(start_ + *at, [this, number, intended = start_ + *at] { Arrive(number, intended); });
}

void Load::Arrive(int64_t number, TimePoint intended) {
  bool room = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!arriving_) return;
    room = active_ < options_.max_sessions;
    if (room) {
      ++active_;
    } else {
      waiting_.push_back({number, intended});
    }
  }
  NextArrival();
  recorder_.Sessions([](SessionFigures* sessions) { ++sessions->arrived; });
  if (room) Begin(number, intended);
}

void Load::Begin(int64_t number, TimePoint intended) {
  recorder_.Sessions(
      [now = active()](SessionFigures* sessions) { sessions->most_at_once = std::max(sessions->most_at_once, now); });
  std::make_shared<Session>(this, number, intended)->Start();
}

void Load::SessionEnded() {
  Waiting next;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (waiting_.empty()) {
      --active_;
      if (active_ == 0) idle_.notify_all();
      return;
    }
    next = waiting_.front();
    waiting_.pop_front();
  }
  Begin(next.number, next.intended);
}

void Load::Stop() {
  const TimePoint now = Clock::now();
  int64_t end = end_.load();
  while (SinceEpoch(now) < end && !end_.compare_exchange_weak(end, SinceEpoch(now))) {
  }
  recorder_.EndAt(now);
  std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  arriving_ = false;
  waiting_.clear();
  idle_.notify_all();
}

bool Load::Wait(Nanos timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  return idle_.wait_for(lock, timeout, [this] { return !arriving_ && active_ == 0; });
}

int64_t Load::active() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return active_;
}

int64_t Load::waiting() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(waiting_.size());
}

bool Load::stopped() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return stopped_;
}

Results Load::Finish() {
  checker_.Finish();
  return recorder_.Get();
}

}  // namespace attnd::attnload

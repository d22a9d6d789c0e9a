#include "client/attnload/executor.h"

#include <sys/prctl.h>

#include <algorithm>
#include <utility>

namespace attnd::attnload {

Executor::Executor(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Work(); });
}

Executor::~Executor() { Stop(); }

void Executor::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  leader_wake_.notify_all();
  follower_wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  std::vector<Task> dropped;  // gone after the mutex: what a task holds may add tasks when it goes
  std::lock_guard<std::mutex> lock(mutex_);
  dropped.swap(heap_);
}

void Executor::At(TimePoint due, std::function<void()> task) {
  bool first = false;
  bool has_leader = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t order = next_order_++;
    heap_.push_back({due, order, std::move(task)});
    std::push_heap(heap_.begin(), heap_.end(), Later);
    first = heap_.front().order == order;
    has_leader = has_leader_;
  }
  // Without a leader nobody is idle, or the follower that was woken for that is on its way.
  if (first && has_leader) leader_wake_.notify_one();
}

void Executor::Work() {
  prctl(PR_SET_TIMERSLACK, 1000);  // ns; the kernel's default wakes sleepers up to 50 us late
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_) {
    if (!heap_.empty() && heap_.front().due <= Clock::now()) {
      std::pop_heap(heap_.begin(), heap_.end(), Later);
      std::function<void()> run = std::move(heap_.back().run);
      heap_.pop_back();
      lock.unlock();
      run();
      run = nullptr;
      lock.lock();
      continue;
    }
    if (has_leader_) {
      follower_wake_.wait(lock);
      continue;
    }
    has_leader_ = true;
    if (heap_.empty()) {
      leader_wake_.wait(lock);
    } else {
      const auto due = heap_.front().due;  // a copy: the heap may move while this thread sleeps
      leader_wake_.wait_until(lock, due);
    }
    has_leader_ = false;
    follower_wake_.notify_one();
  }
}

}  // namespace attnd::attnload

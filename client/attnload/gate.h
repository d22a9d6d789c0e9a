// A limit on calls in flight. Who is beyond it waits here, in order, where the wait is known and counted, instead of
// inside gRPC, where it would look like the server's.
#ifndef ATTND_CLIENT_ATTNLOAD_GATE_H_
#define ATTND_CLIENT_ATTNLOAD_GATE_H_

#include <deque>
#include <functional>
#include <mutex>
#include <utility>

#include "client/attnload/executor.h"

namespace attnd::attnload {

// Thread-safe.
class Gate {
 public:
  Gate(Executor* executor, int64_t limit) : executor_(executor), free_(limit) {}

  // Runs `go` here and now if there is room, otherwise on the executor once there is. Each needs its Leave().
  void Enter(std::function<void()> go) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (free_ == 0) {
        waiting_.push_back(std::move(go));
        return;
      }
      --free_;
    }
    go();
  }

  void Leave() {
    std::function<void()> next;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (waiting_.empty()) {
        ++free_;
        return;
      }
      next = std::move(waiting_.front());
      waiting_.pop_front();
    }
    executor_->Now(std::move(next));
  }

 private:
  Executor* executor_;
  std::mutex mutex_;
  int64_t free_;
  std::deque<std::function<void()>> waiting_;
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_GATE_H_

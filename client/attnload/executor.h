// A few threads that run what is due, in the order of its time. Everything that attnload does itself (building
// requests, looking at answers) runs here and never on gRPC's threads, so that the instant of an answer is taken
// undisturbed; what is late here shows as client wait.
#ifndef ATTND_CLIENT_ATTNLOAD_EXECUTOR_H_
#define ATTND_CLIENT_ATTNLOAD_EXECUTOR_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "client/attnload/clock.h"

namespace attnd::attnload {

// Thread-safe. Tasks may add tasks. The destructor stops.
class Executor {
 public:
  explicit Executor(int threads);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Returns once nothing runs any more; what has not begun is dropped. Not from a task.
  void Stop();

  void At(TimePoint due, std::function<void()> task);
  void Now(std::function<void()> task) { At(Clock::now(), std::move(task)); }

 private:
  struct Task {
    TimePoint due;
    uint64_t order;  // among those of one instant
    std::function<void()> run;
  };
  static bool Later(const Task& a, const Task& b) { return a.due != b.due ? a.due > b.due : a.order > b.order; }
  void Work();

  std::mutex mutex_;
  // One idle thread, the leader, sleeps until the first task is due; the others wait to become the leader.
  std::condition_variable leader_wake_, follower_wake_;
  bool has_leader_ = false;
  bool stopping_ = false;
  uint64_t next_order_ = 0;
  std::vector<Task> heap_;  // the earliest in front
  std::vector<std::thread> threads_;
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_EXECUTOR_H_

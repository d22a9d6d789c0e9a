// The compute threads: a oneTBB arena of which the caller's thread is one. It runs loops of independent tasks.
//
// One thread at a time may call Run.
#ifndef ATTND_SERVER_ENGINE_WORKER_POOL_H_
#define ATTND_SERVER_ENGINE_WORKER_POOL_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "oneapi/tbb/global_control.h"
#include "oneapi/tbb/task_arena.h"
#include "oneapi/tbb/task_scheduler_observer.h"

namespace attnd {

// Lets the process's other threads go before the calling one, by niceness. For threads that compute: those that talk to
// clients want the same processors, for microseconds. Two cores under twice the load that they can serve, client
// included: refusals took 2.0 ms instead of 3.5 (p50), 6 instead of 15 (p99), and as much was computed.
void GiveWay();

class WorkerPool {
 public:
  explicit WorkerPool(int threads);

  int threads() const { return threads_; }

  // Calls f(task, thread) for every task in [0, num_tasks), in order of their numbers as threads become free; no two
  // at a time with the same thread number in [0, threads). Returns when all are done.
  void Run(int64_t num_tasks, absl::FunctionRef<void(int64_t task, int thread)> f);
  // The same on the caller's thread alone, as thread 0: for work that takes less time than waking others.
  static void RunInline(int64_t num_tasks, absl::FunctionRef<void(int64_t task, int thread)> f);

 private:
  const int threads_;
  // oneTBB starts no more threads than the machine has CPUs unless told.
  tbb::global_control parallelism_;
  tbb::task_arena arena_;

  class Observer : public tbb::task_scheduler_observer {
   public:
    explicit Observer(tbb::task_arena& arena) : task_scheduler_observer(arena) { observe(true); }
    ~Observer() override { observe(false); }
    void on_scheduler_entry(bool is_worker) override {
      if (is_worker) GiveWay();
    }
  };
  Observer observer_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_WORKER_POOL_H_

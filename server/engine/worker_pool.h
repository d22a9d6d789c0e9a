// The compute threads: a oneTBB arena of which the caller's thread is one. It runs loops of independent tasks.
//
// One thread at a time may call Run.
#ifndef ATTND_SERVER_ENGINE_WORKER_POOL_H_
#define ATTND_SERVER_ENGINE_WORKER_POOL_H_

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "oneapi/tbb/global_control.h"
#include "oneapi/tbb/task_arena.h"

namespace attnd {

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
};

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_WORKER_POOL_H_

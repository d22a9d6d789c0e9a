// Threads that share numbered tasks by one counter, as the engine's do.
#ifndef ATTND_TESTS_BENCH_POOL_H_
#define ATTND_TESTS_BENCH_POOL_H_

#include <functional>

#include "oneapi/tbb/task_arena.h"

namespace attnd::bench {

class Pool {
 public:
  explicit Pool(int threads);
  void Run(int tasks, const std::function<void(int task, int thread)>& f);
  int threads() const { return threads_; }

 private:
  int threads_;
  tbb::task_arena arena_;
};

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_POOL_H_

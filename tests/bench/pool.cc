#include "tests/bench/pool.h"

#include <algorithm>
#include <atomic>
#include <memory>

#include "oneapi/tbb/global_control.h"
#include "oneapi/tbb/parallel_for.h"
#include "oneapi/tbb/partitioner.h"

namespace attnd::bench {

// oneTBB starts no more threads than the machine has CPUs unless told; of several controls it obeys the strictest, so
// there is one, for the largest pool so far.
Pool::Pool(int threads) : threads_(threads), arena_(threads, 1) {
  static std::unique_ptr<tbb::global_control> control;
  static int most = 0;
  if (threads <= most) return;
  most = threads;
  control.reset();
  control = std::make_unique<tbb::global_control>(tbb::global_control::max_allowed_parallelism, threads);
}

void Pool::Run(int tasks, const std::function<void(int, int)>& f) {
  const int workers = std::min(threads_, tasks);
  if (workers <= 1) {
    for (int task = 0; task < tasks; ++task) f(task, 0);
    return;
  }
  std::atomic<int> next{0};
  const auto work = [&](int) {
    const int thread = tbb::this_task_arena::current_thread_index();
    for (int task; (task = next.fetch_add(1)) < tasks;) f(task, thread);
  };
  arena_.execute([&] { tbb::parallel_for(0, workers, work, tbb::simple_partitioner()); });
}

}  // namespace attnd::bench

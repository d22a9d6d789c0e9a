#include "tests/bench/pool.h"

#include <algorithm>
#include <atomic>

#include "oneapi/tbb/parallel_for.h"
#include "oneapi/tbb/partitioner.h"

namespace attnd::bench {

Pool::Pool(int threads) : threads_(threads), arena_(threads, 1) {}

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

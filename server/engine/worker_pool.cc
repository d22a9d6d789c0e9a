#include "server/engine/worker_pool.h"

#include <algorithm>
#include <atomic>

#include "oneapi/tbb/parallel_for.h"
#include "oneapi/tbb/partitioner.h"

namespace attnd {

WorkerPool::WorkerPool(int threads)
    : threads_(threads), parallelism_(tbb::global_control::max_allowed_parallelism, threads), arena_(threads, 1) {}

void WorkerPool::RunInline(int64_t num_tasks, absl::FunctionRef<void(int64_t, int)> f) {
  for (int64_t task = 0; task < num_tasks; task++) f(task, 0);
}

void WorkerPool::Run(int64_t num_tasks, absl::FunctionRef<void(int64_t, int)> f) {
  const int workers = static_cast<int>(std::min<int64_t>(threads_, num_tasks));
  if (workers <= 1) return RunInline(num_tasks, f);
  // Release and acquire through our own atomics too: ThreadSanitizer does not see the system's oneTBB.
  std::atomic<int64_t> next{0};
  std::atomic<int> finished{0};
  next.store(0, std::memory_order_release);
  const auto work = [&](int) {
    const int thread = tbb::this_task_arena::current_thread_index();
    for (;;) {
      const int64_t task = next.fetch_add(1, std::memory_order_acq_rel);
      if (task >= num_tasks) break;
      f(task, thread);
    }
    finished.fetch_add(1, std::memory_order_acq_rel);
  };
  arena_.execute([&] { tbb::parallel_for(0, workers, work, tbb::simple_partitioner()); });
  (void)finished.load(std::memory_order_acquire);
}

}  // namespace attnd

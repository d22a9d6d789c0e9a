#include "server/engine/worker_pool.h"

#include <algorithm>
#include <atomic>

#include "oneapi/tbb/parallel_for.h"
#include "oneapi/tbb/partitioner.h"

namespace attnd {

namespace {

// ThreadSanitizer does not see how the system's oneTBB orders memory between its threads. So they synchronise through
// this too, first and last thing in every loop; it is static because oneTBB's threads outlive any pool.
constinit std::atomic<uint64_t> order{0};

class Loop {
 public:
  Loop(int64_t num_tasks, absl::FunctionRef<void(int64_t, int)> f) : num_tasks_(num_tasks), f_(f) {
    order.fetch_add(1, std::memory_order_acq_rel);
  }
  void operator()(int) const {
    order.fetch_add(1, std::memory_order_acq_rel);
    const int thread = tbb::this_task_arena::current_thread_index();
    for (;;) {
      const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
      if (task >= num_tasks_) break;
      f_(task, thread);
    }
    order.fetch_add(1, std::memory_order_acq_rel);
  }
  void End() const { order.fetch_add(1, std::memory_order_acq_rel); }

 private:
  const int64_t num_tasks_;
  const absl::FunctionRef<void(int64_t, int)> f_;
  mutable std::atomic<int64_t> next_{0};
};

}  // namespace

WorkerPool::WorkerPool(int threads)
    : threads_(threads), parallelism_(tbb::global_control::max_allowed_parallelism, threads), arena_(threads, 1) {}

void WorkerPool::RunInline(int64_t num_tasks, absl::FunctionRef<void(int64_t, int)> f) {
  for (int64_t task = 0; task < num_tasks; task++) f(task, 0);
}

void WorkerPool::Run(int64_t num_tasks, absl::FunctionRef<void(int64_t, int)> f) {
  const int workers = static_cast<int>(std::min<int64_t>(threads_, num_tasks));
  if (workers <= 1) return RunInline(num_tasks, f);
  const Loop loop(num_tasks, f);
  arena_.execute([&] { tbb::parallel_for(0, workers, loop, tbb::simple_partitioner()); });
  loop.End();
}

}  // namespace attnd

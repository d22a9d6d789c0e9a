// What this machine could do at best: reading memory, and multiplying.
#ifndef ATTND_TESTS_BENCH_ROOFS_H_
#define ATTND_TESTS_BENCH_ROOFS_H_

#include <cstddef>
#include <functional>
#include <memory>

#include "kernels/types.h"
#include "oneapi/tbb/task_arena.h"

namespace attnd::bench {

// Threads that share numbered tasks by one counter, as the engine's do.
class Pool {
 public:
  explicit Pool(int threads);
  void Run(int tasks, const std::function<void(int task, int thread)>& f);
  int threads() const { return threads_; }

 private:
  int threads_;
  tbb::task_arena arena_;
};

// Memory in transparent huge pages (where the kernel grants them), touched.
class HugeArena {
 public:
  explicit HugeArena(size_t bytes);
  ~HugeArena();
  HugeArena(const HugeArena&) = delete;
  HugeArena& operator=(const HugeArena&) = delete;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_;
  size_t bytes_;
};

// Reads `bytes` from `data` (aligned to 64) with all threads of the pool.
void ReadStream(Pool* pool, const std::byte* data, size_t bytes);

// Multiplies operands that stay in L1 and L2, with all threads of the pool: the peak of the ukernel that a KV dtype's
// prefill uses.
class MultiplyPeak {
 public:
  MultiplyPeak(Pool* pool, KvDType kv);
  ~MultiplyPeak();
  void Run();
  double flops() const;  // of one Run

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_ROOFS_H_

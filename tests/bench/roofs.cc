#include "tests/bench/roofs.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "kernels/aligned_buffer.h"
#include "kernels/brgemm.h"
#include "kernels/streaming.h"
#include "oneapi/tbb/parallel_for.h"
#include "oneapi/tbb/partitioner.h"
#include "tests/bench/read_stream.h"

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

HugeArena::HugeArena(size_t bytes) {
  constexpr size_t kHuge = size_t{2} << 20;
  bytes_ = (bytes + kHuge - 1) / kHuge * kHuge;
  data_ = static_cast<std::byte*>(std::aligned_alloc(kHuge, bytes_));
  if (data_ == nullptr) throw std::bad_alloc();
  madvise(data_, bytes_, MADV_HUGEPAGE);
  std::memset(data_, 0, bytes_);
}

HugeArena::~HugeArena() { std::free(data_); }

void ReadStream(Pool* pool, const std::byte* data, size_t bytes) {
  constexpr size_t kPart = size_t{256} << 10;
  static std::atomic<uint64_t> sink;
  pool->Run(static_cast<int>((bytes + kPart - 1) / kPart), [&](int part, int) {
    const size_t first = part * kPart;
    sink.fetch_add(ReadWords(data + first, std::min(kPart, bytes - first)), std::memory_order_relaxed);
  });
}

// 64 x 64 x 64 in a batch of 8: what a tile multiplies with a panel of V, 64 KB (bf16) or 128 KB (f32) of B in L2.
struct MultiplyPeak::State {
  static constexpr int kM = 64, kN = 64, kK = 64, kBatch = 8, kRepeats = 200;
  Pool* pool;
  const Brgemm* kernel = nullptr;  // null: the streaming kernel is all there is
  std::vector<AlignedBuffer> memory;
};

MultiplyPeak::MultiplyPeak(Pool* pool, KvDType kv) : state_(std::make_unique<State>()) {
  state_->pool = pool;
  for (const bool bf16 : {kv == KvDType::kBf16, false}) {
    if (state_->kernel != nullptr) break;
    state_->kernel =
        Brgemm::Get({bf16, State::kM, State::kN, State::kK, State::kBatch, State::kK * State::kBatch, State::kN});
  }
  state_->memory.resize(pool->threads());
  for (AlignedBuffer& buffer : state_->memory) buffer.Reserve(size_t{512} << 10);
}

MultiplyPeak::~MultiplyPeak() = default;

double MultiplyPeak::flops() const {
  return 2.0 * State::kM * State::kN * State::kK * State::kBatch * State::kRepeats * state_->pool->threads();
}

void MultiplyPeak::Run() {
  State& s = *state_;
  s.pool->Run(s.pool->threads(), [&](int, int thread) {
    const AlignedBuffer& buffer = s.memory[thread];
    std::byte* a = buffer.As<std::byte>();
    std::byte* b = a + (size_t{128} << 10);
    float* c = reinterpret_cast<float*>(b + (size_t{128} << 10));
    std::byte* scratchpad = a + (size_t{320} << 10);
    const size_t element = s.kernel != nullptr && s.kernel->shape().bf16 ? 2 : 4;
    BrgemmOffsets offsets[State::kBatch];
    const std::byte* pieces[State::kBatch];
    for (int i = 0; i < State::kBatch; ++i) {
      offsets[i] = {static_cast<int64_t>(i * State::kK * element),
                    static_cast<int64_t>(i * State::kK * State::kN * element)};
      pieces[i] = b + offsets[i].b;
    }
    if (s.kernel != nullptr) s.kernel->SetContext();
    for (int repeat = 0; repeat < State::kRepeats; ++repeat) {
      if (s.kernel != nullptr) {
        s.kernel->Execute(a, b, offsets, c, scratchpad);
        continue;
      }
      StreamProduct(StreamMode::kF32, {a, State::kK * State::kBatch * element, State::kK * element, State::kM, pieces,
                                       State::kBatch, State::kK, State::kN, c, State::kN, nullptr});
    }
    if (s.kernel != nullptr) Brgemm::ReleaseContext();
  });
}

}  // namespace attnd::bench

#include "tests/bench/multiply_peak.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/aligned_buffer.h"
#include "kernels/isa.h"
#include "kernels/streaming.h"
#include "oneapi/dnnl/dnnl_ukernel.h"

namespace attnd::bench {
namespace {

// 64 x 64 x 64 in a batch of 8: what a tile multiplies with a panel of V, at most 128 KB of B.
constexpr int kM = 64, kN = 64, kK = 64, kBatch = 8;
constexpr size_t kOperandBytes = size_t{128} << 10, kScratchpadBytes = size_t{128} << 10;
constexpr size_t kThreadBytes = 3 * kOperandBytes + kScratchpadBytes;
constexpr double kProductFlops = 2.0 * kM * kN * kK * kBatch;

struct Operands {
  dnnl_data_type_t a, b, c;
  int bytes;
};
constexpr Operands kF32 = {dnnl_f32, dnnl_f32, dnnl_f32, 4};

std::vector<Operands> WaysToMultiply(KvDType kv) {
  switch (kv) {
    case KvDType::kBf16:
      return {{dnnl_bf16, dnnl_bf16, dnnl_f32, 2}, kF32};
    case KvDType::kF16:
      return {{dnnl_f16, dnnl_f16, dnnl_f32, 2}, kF32};
    case KvDType::kInt8:
      return {{dnnl_u8, dnnl_s8, dnnl_s32, 1}, kF32};
    case KvDType::kF32:
      break;
  }
  return {kF32};
}

// The ukernel directly, and not kernels/brgemm.h: the roof does not depend on which types attnd uses by now.
class Ukernel {
 public:
  explicit Ukernel(const Operands& operands) : element_(operands.bytes) {
    size_t scratchpad = 0;
    usable_ = dnnl_brgemm_create(&handle_, kM, kN, kK, kBatch, kK * kBatch, kN, kN, operands.a, operands.b,
                                 operands.c) == dnnl_success &&
              dnnl_brgemm_finalize(handle_) == dnnl_success &&
              dnnl_brgemm_get_scratchpad_size(handle_, &scratchpad) == dnnl_success && scratchpad <= kScratchpadBytes &&
              dnnl_brgemm_generate(handle_) == dnnl_success;
  }
  ~Ukernel() {
    if (handle_ != nullptr) dnnl_brgemm_destroy(handle_);
  }
  Ukernel(const Ukernel&) = delete;
  Ukernel& operator=(const Ukernel&) = delete;

  bool usable() const { return usable_; }
  void Multiply(std::byte* memory, int repeats) const {
    dnnl_dim_t offsets[2 * kBatch];
    for (int i = 0; i < kBatch; ++i) {
      offsets[2 * i] = static_cast<dnnl_dim_t>(i) * kK * element_;
      offsets[2 * i + 1] = static_cast<dnnl_dim_t>(i) * kK * kN * element_;
    }
    dnnl_brgemm_set_hw_context(handle_);
    for (int repeat = 0; repeat < repeats; ++repeat) {
      dnnl_brgemm_execute(handle_, memory, memory + kOperandBytes, offsets, memory + 2 * kOperandBytes,
                          memory + 3 * kOperandBytes);
    }
    dnnl_brgemm_release_hw_context();
  }

 private:
  const int element_;
  dnnl_brgemm_t handle_ = nullptr;
  bool usable_ = false;
};

// Where oneDNN has nothing, attnd's own loops are all there is.
void MultiplyByStreaming(std::byte* memory, int repeats) {
  const std::byte* pieces[kBatch];
  for (int i = 0; i < kBatch; ++i) pieces[i] = memory + kOperandBytes + size_t{4} * i * kK * kN;
  const StreamArgs args = {.a = memory,
                           .a_row_bytes = size_t{4} * kK * kBatch,
                           .a_piece_bytes = size_t{4} * kK,
                           .rows = kM,
                           .b = pieces,
                           .pieces = kBatch,
                           .steps = kK,
                           .columns = kN,
                           .c = reinterpret_cast<float*>(memory + 2 * kOperandBytes),
                           .c_ld = kN,
                           .ahead = nullptr};
  for (int repeat = 0; repeat < repeats; ++repeat) StreamProduct(StreamMode::kF32, args);
}

}  // namespace

struct MultiplyPeak::State {
  Pool* pool;
  std::unique_ptr<Ukernel> ukernel;  // null: streaming
  std::vector<AlignedBuffer> memory;
  int repeats = 1;

  void Run(const Ukernel* by, int times) {
    pool->Run(pool->threads(), [&](int, int thread) {
      if (by != nullptr) {
        by->Multiply(memory[thread].As<std::byte>(), times);
      } else {
        MultiplyByStreaming(memory[thread].As<std::byte>(), times);
      }
    });
  }
  // The least of a few, of which the first warms up.
  double SecondsOf(const Ukernel* by, int times) {
    using Clock = std::chrono::steady_clock;
    constexpr int kTries = 5;
    double least = 0;
    for (int i = 0; i < kTries; ++i) {
      const Clock::time_point start = Clock::now();
      Run(by, times);
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      if (i == 0 || seconds < least) least = seconds;
    }
    return least;
  }
};

MultiplyPeak::MultiplyPeak(Pool* pool, KvDType kv) : state_(std::make_unique<State>()) {
  constexpr int kTrials = 20;
  constexpr double kRunSeconds = 2e-3;  // long beside what it takes to wake a thread
  InitIsa();
  State& s = *state_;
  s.pool = pool;
  s.memory.resize(pool->threads());
  for (AlignedBuffer& buffer : s.memory) buffer.Reserve(kThreadBytes);
  double fastest = 0;
  for (const Operands& operands : WaysToMultiply(kv)) {
    auto ukernel = std::make_unique<Ukernel>(operands);
    if (!ukernel->usable()) continue;
    const double seconds = s.SecondsOf(ukernel.get(), kTrials);
    if (s.ukernel != nullptr && seconds >= fastest) continue;
    fastest = seconds;
    s.ukernel = std::move(ukernel);
  }
  if (s.ukernel == nullptr) fastest = s.SecondsOf(nullptr, kTrials);
  s.repeats = static_cast<int>(kTrials * kRunSeconds / fastest) + 1;
}

MultiplyPeak::~MultiplyPeak() = default;

double MultiplyPeak::flops() const { return kProductFlops * state_->repeats * state_->pool->threads(); }

void MultiplyPeak::Run() { state_->Run(state_->ukernel.get(), state_->repeats); }

}  // namespace attnd::bench

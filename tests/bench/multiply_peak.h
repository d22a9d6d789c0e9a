// The roof of what multiplies: oneDNN's ukernel on operands that stay in L1 and L2.
#ifndef ATTND_TESTS_BENCH_MULTIPLY_PEAK_H_
#define ATTND_TESTS_BENCH_MULTIPLY_PEAK_H_

#include <memory>

#include "kernels/types.h"
#include "tests/bench/pool.h"

namespace attnd::bench {

// The peak for a KV dtype: of the machine's ways to multiply such operands the one that turns out fastest.
//   f32   f32 x f32
//   bf16  bf16 x bf16 (vdpbf16ps, AMX), or widened to f32
//   f16   f16 x f16 (AVX512_FP16, AMX_FP16), or widened to f32
//   int8  u8 x s8 (vpdpbusd, AMX), or widened to f32. An integer multiply-add counts as two FLOPs, as one of floats
//         does; quantising Q and the weights, and applying scales, is work that the peak does not do and counts
//         nothing.
// Widening itself counts nothing either: a roof, not a forecast.
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

#endif  // ATTND_TESTS_BENCH_MULTIPLY_PEAK_H_

#include "server/engine/finite_check.h"

#include <algorithm>
#include <cstring>

#include "kernels/append.h"

namespace attnd {
namespace {

// The least magnitude that rounds (to nearest, ties to even) beyond bfloat16's largest number. Infinities and NaN have
// larger bits still.
constexpr uint32_t kBf16OverflowBits = 0x7F7F8000;

int64_t FindBeyondBf16(const std::byte* data, int64_t count) {
  constexpr int64_t kStride = 256;  // so that the loop inside is a vector loop without exits
  for (int64_t begin = 0; begin < count; begin += kStride) {
    const int64_t n = std::min(kStride, count - begin);
    uint32_t bits[kStride];
    std::memcpy(bits, data + begin * sizeof(uint32_t), n * sizeof(uint32_t));
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) largest = std::max(largest, bits[i] & 0x7FFFFFFF);
    if (largest < kBf16OverflowBits) continue;
    for (int64_t i = 0; i < n; i++) {
      if ((bits[i] & 0x7FFFFFFF) >= kBf16OverflowBits) return begin + i;
    }
  }
  return -1;
}

}  // namespace

int64_t FindUnstorable(const std::byte* data, DType dtype, int64_t count, KvDType kv_dtype) {
  if (dtype == DType::kF32 && kv_dtype == KvDType::kBf16) return FindBeyondBf16(data, count);
  return FindNonFinite(data, dtype, count);
}

}  // namespace attnd

// The plain types that every kernel shares: element types, shapes, the options of the softmax, masks.
#ifndef ATTND_KERNELS_TYPES_H_
#define ATTND_KERNELS_TYPES_H_

#include <cstddef>
#include <cstdint>

namespace attnd {

// Element type of a caller's tensor (Q, K, V, out). Little endian, contiguous, any alignment.
enum class DType : uint8_t { kF32, kBf16, kF16 };
constexpr size_t DTypeBytes(DType t) { return t == DType::kF32 ? 4 : 2; }

// Element type of K and V in the cache's blocks.
enum class KvDType : uint8_t { kF32, kBf16, kF16, kInt8 };

inline constexpr int kMaxHeadDim = 256;

// What decides a block's layout and which generated kernels serve it.
struct KvShape {
  int head_dim = 0;   // of Q and K, 1..256
  int value_dim = 0;  // of V, 1..256
  KvDType dtype = KvDType::kF32;
  friend bool operator==(const KvShape&, const KvShape&) = default;
};

// Query head h reads kv head h / (num_q_heads / num_kv_heads).
struct HeadCounts {
  int num_q_heads = 0;  // a multiple of num_kv_heads
  int num_kv_heads = 0;
  int group_size() const { return num_q_heads / num_kv_heads; }
};

struct SoftmaxOptions {
  float softmax_scale = 1.0f;
  float softcap = 0.0f;  // 0: none
  bool causal = true;
  int64_t window = 0;                   // counts the current token; 0: none
  const float* alibi_slopes = nullptr;  // [num_q_heads] or null
  const float* sinks = nullptr;         // [num_q_heads] or null
};

// A bit per (query row, key column), LSB first, rows not padded: bit (row * columns + column).
// Keys before `first_key` and from first_key + columns on are allowed as far as the mask is concerned.
struct MaskView {
  const uint8_t* bits = nullptr;  // null: no mask
  int64_t columns = 0;
  int64_t first_key = 0;  // position of the key of column 0
  int64_t first_row = 0;  // mask row of the work's query row 0 (a chunk of a longer step starts further down)
  bool Allows(int64_t row, int64_t key) const {
    const int64_t column = key - first_key;
    if (bits == nullptr || column < 0 || column >= columns) return true;
    const int64_t bit = (first_row + row) * columns + column;
    return (bits[bit >> 3] >> (bit & 7)) & 1;
  }
};

}  // namespace attnd

#endif  // ATTND_KERNELS_TYPES_H_

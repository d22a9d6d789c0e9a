// Where each element of K and V lies in a block: the unit of KV memory, 64 tokens of one kv head of one layer.
//
// A block is K and then V, both in the layout that the products read, written once at append:
//   K  transposed, [head_dim][64 tokens].
//   V  in panels of 64 columns, each contiguous: panel p is [64 tokens][width] with width = min(64, value_dim - 64 p).
// BF16 goes in pairs and INT8 in quads, along head_dim in K (padded with zeros) and along the tokens in V:
//   BF16  K [head_dim / 2][64][2],  V [32][width][2]: VNNI pairs, as the BRGeMM ukernel multiplies them
//   INT8  K [head_dim / 4][64][4],  V [16][width][4]
// INT8 has a scale per token (its value is scale * element), 64 of them behind K and 64 before V: a block is one stream
// in the order in which it is read.
// Panels, and not rows of value_dim, because a column pass over wide rows reads 256 bytes and skips the rest: the
// hardware prefetchers lose the stream (measured: 0.40 of the read roof against 0.80).
#ifndef ATTND_KERNELS_BLOCK_LAYOUT_H_
#define ATTND_KERNELS_BLOCK_LAYOUT_H_

#include <cstddef>

#include "kernels/types.h"

namespace attnd {

inline constexpr int kBlockTokens = 64;
inline constexpr int kPanelColumns = 64;
// Blocks of one run: the unit inside which sums are taken in one go, from zero, in block order. Runs are aligned to
// block index and merged in order, so this number is part of the answer's bits. 8 to 16 measured best for decode.
inline constexpr int kRunBlocks = 8;
inline constexpr int kRunTokens = kRunBlocks * kBlockTokens;

constexpr size_t KvElementBytes(KvDType dtype) { return dtype == KvDType::kF32 ? 4 : dtype == KvDType::kInt8 ? 1 : 2; }

// Elements that lie together: dimensions of K, tokens of V.
constexpr int KvGroup(KvDType dtype) { return dtype == KvDType::kInt8 ? 4 : dtype == KvDType::kBf16 ? 2 : 1; }

// A group: what the products read of a token (K) or column (V) at a time. F16: 2, all others: 4.
constexpr size_t KvUnitBytes(KvDType dtype) { return KvGroup(dtype) * KvElementBytes(dtype); }

struct BlockLayout {
  KvShape shape;
  size_t k_bytes = 0;      // multiple of 64
  size_t v_bytes = 0;      // multiple of 64
  size_t block_bytes = 0;  // k_bytes + v_bytes
  int num_panels = 0;
  size_t scale_bytes = 0;  // of K's scales and of V's each; 0 but for INT8

  explicit BlockLayout(const KvShape& shape);
  int PanelWidth(int panel) const;
  int KUnits() const { return (shape.head_dim + KvGroup(shape.dtype) - 1) / KvGroup(shape.dtype); }
  // From the block's start.
  size_t PanelOffset(int panel) const;
  size_t KScalesOffset() const { return k_bytes - scale_bytes; }
  size_t VScalesOffset() const { return k_bytes; }
};

}  // namespace attnd

#endif  // ATTND_KERNELS_BLOCK_LAYOUT_H_

// Where each element of K and V lies in a block: the unit of KV memory, 64 tokens of one kv head of one layer.
//
// A block is K and then V, both in the layout that the BRGeMM ukernel multiplies, written once at append:
//   K  transposed, [k_rows][64 tokens]. F32: k_rows = head_dim. BF16: VNNI pairs, [head_dim padded to even / 2][64][2].
//   V  in panels of 64 columns, each contiguous: panel p is [64 tokens][width] with width = min(64, value_dim - 64 p).
//      BF16: VNNI pairs along the tokens, [32][width][2].
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

struct BlockLayout {
  KvShape shape;
  size_t k_bytes = 0;      // multiple of 64
  size_t v_bytes = 0;      // multiple of 64
  size_t block_bytes = 0;  // k_bytes + v_bytes
  int num_panels = 0;

  explicit BlockLayout(const KvShape& shape);
  int PanelWidth(int panel) const;
  size_t PanelOffset(int panel) const;  // from the block's start
};

}  // namespace attnd

#endif  // ATTND_KERNELS_BLOCK_LAYOUT_H_

// Writing tokens into blocks: transposes, packs and converts K and V from the caller's rows once, so that neither
// decode nor prefill ever repacks. Also the check that a tensor is finite.
#ifndef ATTND_KERNELS_APPEND_H_
#define ATTND_KERNELS_APPEND_H_

#include <cstddef>
#include <cstdint>

#include "kernels/block_layout.h"
#include "kernels/types.h"

namespace attnd {

// Rows of one kv head inside a tensor [tokens, num_kv_heads, dim]: row t starts at data + t * row_bytes.
struct RowsView {
  const std::byte* data = nullptr;  // any alignment
  size_t row_bytes = 0;             // distance between rows
  DType dtype = DType::kF32;
};

// Zero-fills V and its scales (0 x NaN would poison a masked tail: every slot that no token was written to must hold
// finite values) but for the slots [0, first_slot), which the caller fills at once. K needs nothing: the scores of
// unwritten slots are never used.
void InitBlock(const BlockLayout& layout, std::byte* block, int first_slot = 0);

// Writes rows [0, num_tokens) of k and v to slots [first_slot, first_slot + num_tokens) of the block.
// Rounds to nearest, ties to even; what is beyond the largest BF16 or F16 becomes infinite. INT8: symmetric per token,
// scale = max|x| / 127 and elements x * (127 / max|x|), rounded to nearest, ties to even (zeros, with scale 0, where
// the scale would not be a normal number). Does not look whether values are finite. REQUIRES: first_slot + num_tokens
// <= kBlockTokens.
void WriteTokens(const BlockLayout& layout, std::byte* block, int first_slot, int num_tokens, const RowsView& k,
                 const RowsView& v);

// Copies slots [0, num_tokens) of `from` to `to` (a block that was initialised); the other slots of `to` stay.
void CopyTokens(const BlockLayout& layout, const std::byte* from, int num_tokens, std::byte* to);

// Index of the first element of data[0, count) that is infinite or NaN, or -1.
int64_t FindNonFinite(const std::byte* data, DType dtype, int64_t count);

}  // namespace attnd

#endif  // ATTND_KERNELS_APPEND_H_

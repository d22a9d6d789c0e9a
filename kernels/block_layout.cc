#include "kernels/block_layout.h"

#include <algorithm>
#include <cassert>

namespace attnd {
namespace {

constexpr size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

size_t ElementBytes(KvDType dtype) { return dtype == KvDType::kF32 ? 4 : 2; }

}  // namespace

BlockLayout::BlockLayout(const KvShape& s) : shape(s) {
  assert(s.head_dim >= 1 && s.head_dim <= kMaxHeadDim);
  assert(s.value_dim >= 1 && s.value_dim <= kMaxHeadDim);
  const size_t element = ElementBytes(s.dtype);
  const size_t k_rows = s.dtype == KvDType::kF32 ? s.head_dim : RoundUp(s.head_dim, 2);
  k_bytes = k_rows * kBlockTokens * element;
  v_bytes = RoundUp(size_t{kBlockTokens} * s.value_dim * element, 64);
  block_bytes = k_bytes + v_bytes;
  num_panels = (s.value_dim + kPanelColumns - 1) / kPanelColumns;
}

int BlockLayout::PanelWidth(int panel) const {
  assert(panel >= 0 && panel < num_panels);
  return std::min(kPanelColumns, shape.value_dim - kPanelColumns * panel);
}

size_t BlockLayout::PanelOffset(int panel) const {
  return k_bytes + size_t{kBlockTokens} * kPanelColumns * panel * ElementBytes(shape.dtype);
}

}  // namespace attnd

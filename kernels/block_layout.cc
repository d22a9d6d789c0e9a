#include "kernels/block_layout.h"

#include <algorithm>
#include <cassert>

namespace attnd {
namespace {

constexpr size_t RoundUp(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

BlockLayout::BlockLayout(const KvShape& s) : shape(s) {
  assert(s.head_dim >= 1 && s.head_dim <= kMaxHeadDim);
  assert(s.value_dim >= 1 && s.value_dim <= kMaxHeadDim);
  if (s.dtype == KvDType::kInt8) scale_bytes = kBlockTokens * sizeof(float);
  k_bytes = KUnits() * kBlockTokens * KvUnitBytes(s.dtype) + scale_bytes;
  v_bytes = RoundUp(size_t{kBlockTokens} * s.value_dim * KvElementBytes(s.dtype), 64) + scale_bytes;
  block_bytes = k_bytes + v_bytes;
  num_panels = (s.value_dim + kPanelColumns - 1) / kPanelColumns;
}

int BlockLayout::PanelWidth(int panel) const {
  assert(panel >= 0 && panel < num_panels);
  return std::min(kPanelColumns, shape.value_dim - kPanelColumns * panel);
}

size_t BlockLayout::PanelOffset(int panel) const {
  return k_bytes + scale_bytes + size_t{kBlockTokens} * kPanelColumns * panel * KvElementBytes(shape.dtype);
}

}  // namespace attnd

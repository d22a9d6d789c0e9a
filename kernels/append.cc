#include "kernels/append.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/append.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "hwy/highway.h"
#include "kernels/isa.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// True if an element has all its exponent bits set: infinite or NaN.
template <class T>
bool AnyNonFinite(const std::byte* data, size_t count, T exponent) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  const auto mask = hn::Set(d, exponent);
  auto found = hn::MaskFalse(d);
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const auto bits = hn::LoadU(d, reinterpret_cast<const T*>(data + i * sizeof(T)));
    found = hn::Or(found, hn::Eq(hn::And(bits, mask), mask));
  }
  if (!hn::AllFalse(d, found)) return true;
  for (; i < count; ++i) {
    T bits;
    std::memcpy(&bits, data + i * sizeof(T), sizeof(T));
    if ((bits & exponent) == exponent) return true;
  }
  return false;
}

bool AnyNonFinite32(const std::byte* data, size_t count, uint32_t exponent) {
  return AnyNonFinite<uint32_t>(data, count, exponent);
}
bool AnyNonFinite16(const std::byte* data, size_t count, uint16_t exponent) {
  return AnyNonFinite<uint16_t>(data, count, exponent);
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {
namespace {

HWY_EXPORT(AnyNonFinite32);
HWY_EXPORT(AnyNonFinite16);

// The elements at one place of `count` groups that are `stride` bytes apart.
void CopyPlace(const std::byte* from, size_t count, size_t element_bytes, size_t stride, std::byte* to) {
  for (size_t i = 0; i < count; ++i, from += stride, to += stride) std::memcpy(to, from, element_bytes);
}

}  // namespace

void InitBlock(const BlockLayout& layout, std::byte* block, int first_slot) {
  assert(first_slot >= 0 && first_slot <= kBlockTokens);
  // Whole groups: a token that is written alone leaves its neighbours as they are.
  const int group = KvGroup(layout.shape.dtype), first_group = first_slot / group;
  if (first_slot == kBlockTokens) return;
  for (int p = 0; p < layout.num_panels; ++p) {
    const size_t group_bytes = layout.PanelWidth(p) * KvUnitBytes(layout.shape.dtype);
    std::memset(block + layout.PanelOffset(p) + first_group * group_bytes, 0,
                (kBlockTokens / group - first_group) * group_bytes);
  }
  const size_t first_scale = layout.scale_bytes / kBlockTokens * first_slot;
  std::memset(block + layout.VScalesOffset() + first_scale, 0, layout.scale_bytes - first_scale);
}

void CopyTokens(const BlockLayout& layout, const std::byte* from, int num_tokens, std::byte* to) {
  assert(num_tokens >= 0 && num_tokens <= kBlockTokens);
  const KvDType dtype = layout.shape.dtype;
  const size_t element = KvElementBytes(dtype), unit = KvUnitBytes(dtype);
  for (size_t row = 0; row < layout.KScalesOffset(); row += kBlockTokens * unit) {
    std::memcpy(to + row, from + row, num_tokens * unit);
  }
  const size_t group = KvGroup(dtype), groups = num_tokens / group;
  for (int p = 0; p < layout.num_panels; ++p) {
    const size_t width = layout.PanelWidth(p), offset = layout.PanelOffset(p), whole = groups * width * unit;
    std::memcpy(to + offset, from + offset, whole);
    for (size_t place = 0; place < num_tokens % group; ++place) {
      const size_t first = offset + whole + place * element;
      CopyPlace(from + first, width, element, unit, to + first);
    }
  }
  if (layout.scale_bytes == 0) return;
  for (const size_t scales : {layout.KScalesOffset(), layout.VScalesOffset()}) {
    std::memcpy(to + scales, from + scales, num_tokens * sizeof(float));
  }
}

int64_t FindNonFinite(const std::byte* data, DType dtype, int64_t count) {
  InitIsa();
  // Whole stretches are tested by SIMD; only the one that holds the culprit is looked through again.
  constexpr int64_t kStretch = 4096;
  const size_t size = DTypeBytes(dtype);
  const uint16_t exponent16 = dtype == DType::kBf16 ? 0x7F80 : 0x7C00;
  const auto any = [&](int64_t first, int64_t n) {
    const std::byte* p = data + first * size;
    return dtype == DType::kF32 ? HWY_DYNAMIC_DISPATCH(AnyNonFinite32)(p, n, 0x7F800000u)
                                : HWY_DYNAMIC_DISPATCH(AnyNonFinite16)(p, n, exponent16);
  };
  for (int64_t first = 0; first < count; first += kStretch) {
    const int64_t n = std::min(kStretch, count - first);
    if (!any(first, n)) continue;
    for (int64_t i = first;; ++i) {
      if (any(i, 1)) return i;
    }
  }
  return -1;
}

}  // namespace attnd
#endif  // HWY_ONCE

#include "kernels/append.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/append.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "hwy/highway.h"
#include "kernels/convert.h"
#include "kernels/isa.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// to[c * to_ld + r] = from[r * from_ld + c] for 4 rows and 4 columns of 32-bit units.
HWY_INLINE void Transpose4x4(const uint32_t* from, size_t from_ld, uint32_t* to, size_t to_ld) {
  const hn::FixedTag<uint32_t, 4> d;
  const hn::FixedTag<uint64_t, 2> d64;
  const auto r0 = hn::LoadU(d, from), r1 = hn::LoadU(d, from + from_ld);
  const auto r2 = hn::LoadU(d, from + 2 * from_ld), r3 = hn::LoadU(d, from + 3 * from_ld);
  const auto lo01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));  // r0[0] r1[0] r0[1] r1[1]
  const auto lo23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
  const auto hi01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
  const auto hi23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, lo01, lo23)), d, to);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, lo01, lo23)), d, to + to_ld);
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, hi01, hi23)), d, to + 2 * to_ld);
  hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, hi01, hi23)), d, to + 3 * to_ld);
}

// to[c * to_ld + r] = from[r * from_ld + c], rows x columns.
void Transpose32(const uint32_t* from, size_t from_ld, size_t rows, size_t columns, uint32_t* to, size_t to_ld) {
  const size_t rows4 = rows & ~size_t{3}, columns4 = columns & ~size_t{3};
  for (size_t c = 0; c < columns4; c += 4) {
    for (size_t r = 0; r < rows4; r += 4) Transpose4x4(from + r * from_ld + c, from_ld, to + c * to_ld + r, to_ld);
  }
  for (size_t r = 0; r < rows; ++r) {
    for (size_t c = r < rows4 ? columns4 : 0; c < columns; ++c) to[c * to_ld + r] = from[r * from_ld + c];
  }
}

// to[c] = even[c] | odd[c] << 16: the VNNI pairs of two tokens.
void InterleavePairs(const uint16_t* even, const uint16_t* odd, size_t columns, uint16_t* to) {
  const hn::ScalableTag<uint16_t> d;
  const size_t lanes = hn::Lanes(d);
  size_t c = 0;
  for (; c + lanes <= columns; c += lanes) {
    hn::StoreInterleaved2(hn::LoadU(d, even + c), hn::LoadU(d, odd + c), d, to + 2 * c);
  }
  for (; c < columns; ++c) {
    to[2 * c] = even[c];
    to[2 * c + 1] = odd[c];
  }
}

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

HWY_EXPORT(Transpose32);
HWY_EXPORT(InterleavePairs);
HWY_EXPORT(AnyNonFinite32);
HWY_EXPORT(AnyNonFinite16);

// Tokens that are converted before they are laid out: 16 rows of 256 floats are 16 KB, a third of L1.
constexpr int kBatchTokens = 16;
constexpr int kRowUnits = kMaxHeadDim;

void WriteK(const BlockLayout& layout, std::byte* block, int slot, int tokens, const RowsView& k) {
  // F32 elements and bf16 pairs are both 32-bit units, and both go to [unit][64 tokens].
  const bool narrow = layout.shape.dtype != KvDType::kF32;
  const int dim = layout.shape.head_dim;
  const int units = narrow ? (dim + 1) / 2 : dim;
  alignas(64) uint32_t rows[kBatchTokens * kRowUnits];
  for (int t = 0; t < tokens; ++t) {
    const std::byte* from = k.data + t * k.row_bytes;
    uint32_t* row = rows + t * kRowUnits;
    if (narrow) {
      row[units - 1] = 0;  // an odd dimension's last pair is padded with zero
      RowToBf16(from, k.dtype, dim, reinterpret_cast<uint16_t*>(row));
    } else {
      WidenRow(from, k.dtype, dim, reinterpret_cast<float*>(row));
    }
  }
  HWY_DYNAMIC_DISPATCH(Transpose32)
  (rows, kRowUnits, tokens, units, reinterpret_cast<uint32_t*>(block) + slot, kBlockTokens);
}

void WriteVF32(const BlockLayout& layout, std::byte* block, int slot, int tokens, const RowsView& v) {
  alignas(64) float row[kMaxHeadDim];
  for (int t = 0; t < tokens; ++t) {
    WidenRow(v.data + t * v.row_bytes, v.dtype, layout.shape.value_dim, row);
    for (int p = 0; p < layout.num_panels; ++p) {
      const size_t width = layout.PanelWidth(p);
      std::byte* panel = block + layout.PanelOffset(p);
      std::memcpy(panel + (slot + t) * width * sizeof(float), row + p * kPanelColumns, width * sizeof(float));
    }
  }
}

void WriteVBf16(const BlockLayout& layout, std::byte* block, int slot, int tokens, const RowsView& v) {
  alignas(64) uint16_t rows[2][kMaxHeadDim];
  for (int t = 0; t < tokens;) {
    const bool whole_pair = (slot + t) % 2 == 0 && t + 1 < tokens;
    for (int i = 0; i <= int{whole_pair}; ++i) {
      RowToBf16(v.data + (t + i) * v.row_bytes, v.dtype, layout.shape.value_dim, rows[i]);
    }
    for (int p = 0; p < layout.num_panels; ++p) {
      const int width = layout.PanelWidth(p);
      uint16_t* panel = reinterpret_cast<uint16_t*>(block + layout.PanelOffset(p));
      uint16_t* pairs = panel + static_cast<size_t>((slot + t) / 2) * width * 2;
      const int column = p * kPanelColumns;
      if (whole_pair) {
        HWY_DYNAMIC_DISPATCH(InterleavePairs)(rows[0] + column, rows[1] + column, width, pairs);
      } else {
        for (int c = 0; c < width; ++c) pairs[2 * c + (slot + t) % 2] = rows[0][column + c];
      }
    }
    t += whole_pair ? 2 : 1;
  }
}

}  // namespace

void InitBlock(const BlockLayout& layout, std::byte* block) { std::memset(block + layout.k_bytes, 0, layout.v_bytes); }

void WriteTokens(const BlockLayout& layout, std::byte* block, int first_slot, int num_tokens, const RowsView& k,
                 const RowsView& v) {
  assert(first_slot >= 0 && num_tokens >= 0 && first_slot + num_tokens <= kBlockTokens);
  InitIsa();
  for (int done = 0; done < num_tokens; done += kBatchTokens) {
    const int tokens = std::min(kBatchTokens, num_tokens - done);
    const RowsView k_rows{k.data + done * k.row_bytes, k.row_bytes, k.dtype};
    const RowsView v_rows{v.data + done * v.row_bytes, v.row_bytes, v.dtype};
    WriteK(layout, block, first_slot + done, tokens, k_rows);
    if (layout.shape.dtype == KvDType::kF32) {
      WriteVF32(layout, block, first_slot + done, tokens, v_rows);
    } else {
      WriteVBf16(layout, block, first_slot + done, tokens, v_rows);
    }
  }
}

void CopyTokens(const BlockLayout& layout, const std::byte* from, int num_tokens, std::byte* to) {
  assert(num_tokens >= 0 && num_tokens <= kBlockTokens);
  constexpr size_t kRowBytes = kBlockTokens * sizeof(uint32_t);  // F32 elements or bf16 pairs of 64 tokens
  for (size_t row = 0; row < layout.k_bytes; row += kRowBytes) {
    std::memcpy(to + row, from + row, num_tokens * sizeof(uint32_t));
  }
  const bool narrow = layout.shape.dtype != KvDType::kF32;
  for (int p = 0; p < layout.num_panels; ++p) {
    const size_t width = layout.PanelWidth(p), offset = layout.PanelOffset(p);
    if (!narrow) {
      std::memcpy(to + offset, from + offset, num_tokens * width * sizeof(float));
      continue;
    }
    const size_t pairs_bytes = num_tokens / 2 * width * sizeof(uint32_t);
    std::memcpy(to + offset, from + offset, pairs_bytes);
    if (num_tokens % 2 == 0) continue;
    const uint16_t* last_from = reinterpret_cast<const uint16_t*>(from + offset + pairs_bytes);
    uint16_t* last_to = reinterpret_cast<uint16_t*>(to + offset + pairs_bytes);
    for (size_t c = 0; c < width; ++c) last_to[2 * c] = last_from[2 * c];
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

// WriteTokens of append.h. Rows are converted in registers, 16 tokens (or pairs of tokens) at a time, and K's are then
// transposed by whole cache lines.
#include <algorithm>
#include <cassert>
#include <cstring>

#include "kernels/append.h"
#include "kernels/unroll.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/write_tokens.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "hwy/highway.h"
#include "kernels/bf16-inl.h"
#include "kernels/isa.h"
#include "kernels/prefetch.h"
#include "kernels/row_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

using DF = hn::ScalableTag<float>;
using DU = hn::ScalableTag<uint32_t>;
using D16 = hn::Rebind<uint16_t, DF>;
using VU = hn::Vec<DU>;

constexpr size_t kLanes = hn::MaxLanes(DF());

// Tokens of K before they are transposed, in rows of 32-bit units: a unit is what lies together (block_layout.h), or in
// F16 the elements of two neighbouring tokens. 16 units of a column are a cache line of the block.
constexpr int kUnitRows = 16;
constexpr size_t kUnitLd = kMaxHeadDim + 16;  // rows a power of two apart would share few sets of L1

// Rows of a tensor of many heads lie far apart, where no hardware prefetcher finds them.
constexpr int kAheadRows = 16;

// The bits of `n` elements as a 16-bit type, in the lower halves.
template <KvDType kTo, DType kFrom>
HWY_INLINE VU LoadAs16(const std::byte* row, size_t i, size_t n) {
  static_assert(kTo == KvDType::kBf16 || kTo == KvDType::kF16);
  const DF d;
  const DU du;
  if constexpr ((kTo == KvDType::kBf16) == (kFrom == DType::kBf16) && kFrom != DType::kF32) {
    return hn::PromoteTo(du, LoadBytes(D16(), row + i * sizeof(uint16_t), n));
  } else if constexpr (kTo == KvDType::kBf16) {
    return hn::ShiftRight<16>(RoundAnyBitsToBf16(du, hn::BitCast(du, LoadAsF32<kFrom>(d, row, i, n))));
  } else {
    const hn::Rebind<hwy::float16_t, DF> df16;
    return hn::PromoteTo(du, hn::BitCast(D16(), hn::DemoteTo(df16, LoadAsF32<kFrom>(d, row, i, n))));
  }
  (void)d;
}

// A row (of any 16-bit type) as 16-bit elements one after the other.
template <KvDType kTo, DType kFrom>
HWY_INLINE void Convert16(const std::byte* row, size_t count, std::byte* to) {
  ForVectors(kLanes, count, [&](size_t i, size_t n) ATTND_STEP {
    StoreBytes(D16(), hn::TruncateTo(D16(), LoadAs16<kTo, kFrom>(row, i, n)), to + i * sizeof(uint16_t), n);
  });
}

// Symmetric quantisation of a row: x is about scale * q with |q| <= 127; q is x * (127 / max|x|) rounded to nearest,
// ties to even. Returns the scale, max|x| / 127. Where the scale would not be a normal number all is zero.
template <DType kFrom>
HWY_INLINE float QuantizeRow(const std::byte* row, size_t count, int8_t* to) {
  const DF d;
  // Four vectors in a turn: maxima that do not wait for each other, and whole vectors of bytes.
  const size_t whole = count / (4 * kLanes) * (4 * kLanes);
  hn::Vec<DF> tops[4] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Zero(d)};
  for (size_t i = 0; i < whole; i += 4 * kLanes) {
    ATTND_UNROLL
    for (size_t v = 0; v < 4; ++v) {
      tops[v] = hn::Max(tops[v], hn::Abs(LoadAsF32<kFrom>(d, row, i + v * kLanes, kLanes)));
    }
  }
  auto top = hn::Max(hn::Max(tops[0], tops[1]), hn::Max(tops[2], tops[3]));
  ForVectors(kLanes, count - whole, [&](size_t i, size_t n) ATTND_STEP {
    top = hn::Max(top, hn::Abs(LoadAsF32<kFrom>(d, row, whole + i, n)));
  });
  constexpr float kLeast = 127 * 1.17549435e-38f;
  const float largest = hn::ReduceMax(d, top);
  const bool vanishes = largest < kLeast;
  const auto inverse = hn::Set(d, vanishes ? 0.0f : 127.0f / largest);
  const auto quantized = [&](size_t i, size_t n)
                             ATTND_STEP { return hn::NearestInt(hn::Mul(LoadAsF32<kFrom>(d, row, i, n), inverse)); };
  const hn::Repartition<int16_t, DF> d16;
  const hn::Repartition<int8_t, DF> d8;
  for (size_t i = 0; i < whole; i += 4 * kLanes) {
    const auto q01 = hn::OrderedDemote2To(d16, quantized(i, kLanes), quantized(i + kLanes, kLanes));
    const auto q23 = hn::OrderedDemote2To(d16, quantized(i + 2 * kLanes, kLanes), quantized(i + 3 * kLanes, kLanes));
    hn::StoreU(hn::OrderedDemote2To(d8, q01, q23), d8, to + i);
  }
  const hn::Rebind<int8_t, DF> d8_quarter;
  ForVectors(kLanes, count - whole, [&](size_t i, size_t n) ATTND_STEP {
    StoreBytes(d8_quarter, hn::DemoteTo(d8_quarter, quantized(whole + i, n)),
               reinterpret_cast<std::byte*>(to + whole + i), n);
  });
  return vanishes ? 0.0f : largest / 127.0f;
}

// Four rows' 16-byte pieces and so on: block b of the vector is row 4 b.
template <class D>
HWY_INLINE hn::Vec<D> LoadRowBlocks(D d, const uint32_t* p) {
  if constexpr (hn::MaxLanes(d) == 4) {
    return hn::LoadU(d, p);
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, LoadRowBlocks(half, p + hn::MaxLanes(half) * kUnitLd), LoadRowBlocks(half, p));
  }
}

// to[u * to_ld + r] = rows[r * kUnitLd + u] for as many rows as D has lanes and `count` <= 4 units.
template <class D>
HWY_INLINE void TransposeUnits(D d, const uint32_t* rows, uint32_t* to, size_t to_ld, size_t count) {
  const hn::Repartition<uint64_t, D> d64;
  const auto r0 = LoadRowBlocks(d, rows), r1 = LoadRowBlocks(d, rows + kUnitLd);
  const auto r2 = LoadRowBlocks(d, rows + 2 * kUnitLd), r3 = LoadRowBlocks(d, rows + 3 * kUnitLd);
  const auto lo01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));  // r0[0] r1[0] r0[1] r1[1]
  const auto lo23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
  const auto hi01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
  const auto hi23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
  hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, lo01, lo23)), d, to);
  if (count > 1) hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, lo01, lo23)), d, to + to_ld);
  if (count > 2) hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, hi01, hi23)), d, to + 2 * to_ld);
  if (count > 3) hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, hi01, hi23)), d, to + 3 * to_ld);
}

template <class D>
HWY_INLINE void TransposeRows(D d, const uint32_t* rows, int units, uint32_t* to, size_t to_ld) {
  int u = 0;
  for (; u + 4 <= units; u += 4) TransposeUnits(d, rows + u, to + u * to_ld, to_ld, 4);
  if (u < units) TransposeUnits(d, rows + u, to + u * to_ld, to_ld, units - u);
}

// One row by itself. Unrolled, so that the next token's loads come early into the out-of-order window.
template <class T>
HWY_INLINE void ScatterRow(const T* row, int count, T* to, size_t to_ld) {
  int i = 0;
  for (; i + 8 <= count; i += 8, to += 8 * to_ld) {
    ATTND_UNROLL
    for (int j = 0; j < 8; ++j) to[j * to_ld] = row[i + j];
  }
  for (; i < count; ++i, to += to_ld) *to = row[i];
}

// to[u * to_ld + r] = rows[r * kUnitLd + u].
HWY_INLINE void Transpose(const uint32_t* rows, int num_rows, int units, uint32_t* to, size_t to_ld) {
  int r = 0;
  for (; r + static_cast<int>(kLanes) <= num_rows; r += kLanes) {
    TransposeRows(DU(), rows + r * kUnitLd, units, to + r, to_ld);
  }
  for (; r + 4 <= num_rows; r += 4) {
    TransposeRows(hn::FixedTag<uint32_t, 4>(), rows + r * kUnitLd, units, to + r, to_ld);
  }
  for (; r < num_rows; ++r) ScatterRow(rows + r * kUnitLd, units, to + r, to_ld);
}

// A token's units; the last one is padded with zeros.
template <KvDType kTo, DType kFrom>
HWY_INLINE void PackToken(const std::byte* row, int dim, int units, uint32_t* to, float* scale) {
  if constexpr (kTo == KvDType::kF32) {
    const DF d;
    ForVectors(kLanes, dim, [&](size_t i, size_t n) ATTND_STEP {
      StoreBytes(d, LoadAsF32<kFrom>(d, row, i, n), reinterpret_cast<std::byte*>(to + i), n);
    });
  } else {
    to[units - 1] = 0;
    if constexpr (kTo == KvDType::kInt8) {
      *scale = QuantizeRow<kFrom>(row, dim, reinterpret_cast<int8_t*>(to));
    } else {
      Convert16<kTo, kFrom>(row, dim, reinterpret_cast<std::byte*>(to));
    }
  }
  (void)units, (void)scale;
}

// Two rows' elements in pairs: to[i] = even[i] | odd[i] << 16.
template <KvDType kTo, DType kFrom>
HWY_INLINE void PackPairs(const std::byte* even, const std::byte* odd, size_t first, size_t count, uint32_t* to) {
  ForVectors(kLanes, count, [&](size_t i, size_t n) ATTND_STEP {
    const VU low = LoadAs16<kTo, kFrom>(even, first + i, n);
    const VU high = hn::ShiftLeft<16>(LoadAs16<kTo, kFrom>(odd, first + i, n));
    StoreBytes(DU(), hn::Or(low, high), reinterpret_cast<std::byte*>(to + i), n);
  });
}

template <KvDType kTo, DType kFrom>
void WriteK(const BlockLayout& layout, std::byte* block, int slot, int tokens, const RowsView& k) {
  const int units = layout.KUnits();
  const size_t row_bytes = layout.shape.head_dim * DTypeBytes(kFrom);
  uint32_t* to = reinterpret_cast<uint32_t*>(block);
  float* scales = reinterpret_cast<float*>(block + layout.KScalesOffset());
  alignas(64) uint32_t rows[kUnitRows * kUnitLd];
  for (int t = 0; t < tokens;) {
    // Up to a multiple of 16 slots: all but the first and the last are whole cache lines.
    const int n = std::min(kUnitRows - (slot + t) % kUnitRows, tokens - t);
    for (int r = 0; r < n; ++r) {
      if (t + r + kAheadRows < tokens) PrefetchToL2(k.data + (t + r + kAheadRows) * k.row_bytes, row_bytes);
      for (int u = r * units / n; u < (r + 1) * units / n; ++u) {
        __builtin_prefetch(to + slot + t + u * kBlockTokens, 1, 3);
      }
      PackToken<kTo, kFrom>(k.data + (t + r) * k.row_bytes, layout.shape.head_dim, units, rows + r * kUnitLd,
                            scales + slot + t + r);
    }
    Transpose(rows, n, units, to + slot + t, kBlockTokens);
    t += n;
  }
}

// F16 K: pairs of tokens are the units, but for a token that comes without its neighbour.
template <DType kFrom>
void WriteKF16(const BlockLayout& layout, std::byte* block, int slot, int tokens, const RowsView& k) {
  const int dim = layout.shape.head_dim;
  alignas(64) uint32_t rows[kUnitRows * kUnitLd];
  for (int t = 0; t < tokens;) {
    const std::byte* from = k.data + t * k.row_bytes;
    const int first = slot + t, pair = first / 2;
    if (first % 2 != 0 || t + 1 == tokens) {
      Convert16<KvDType::kF16, kFrom>(from, dim, reinterpret_cast<std::byte*>(rows));
      ScatterRow(reinterpret_cast<const uint16_t*>(rows), dim, reinterpret_cast<uint16_t*>(block) + first,
                 kBlockTokens);
      ++t;
      continue;
    }
    const int n = std::min(kUnitRows - pair % kUnitRows, (tokens - t) / 2);
    for (int r = 0; r < n; ++r, from += 2 * k.row_bytes) {
      for (int i = 0; i < 2; ++i) {
        const int ahead = t + 2 * r + i + kAheadRows;
        if (ahead < tokens) PrefetchToL2(k.data + ahead * k.row_bytes, dim * DTypeBytes(kFrom));
      }
      if (n == kUnitRows) {
        for (int d = r * dim / n; d < (r + 1) * dim / n; ++d) {
          __builtin_prefetch(reinterpret_cast<uint32_t*>(block) + pair + d * (kBlockTokens / 2), 1, 3);
        }
      }
      PackPairs<KvDType::kF16, kFrom>(from, from + k.row_bytes, 0, dim, rows + r * kUnitLd);
    }
    Transpose(rows, n, dim, reinterpret_cast<uint32_t*>(block) + pair, kBlockTokens / 2);
    t += 2 * n;
  }
}

// F32 and F16 V: plain rows of each panel.
template <KvDType kTo, DType kFrom>
void WriteVRows(const BlockLayout& layout, std::byte* block, int slot, int tokens, const RowsView& v) {
  const DF d;
  for (int p = 0; p < layout.num_panels; ++p) {
    const size_t width = layout.PanelWidth(p), row_bytes = width * KvElementBytes(kTo);
    std::byte* to = block + layout.PanelOffset(p) + slot * row_bytes;
    const std::byte* from = v.data + p * kPanelColumns * DTypeBytes(kFrom);
    for (int t = 0; t < tokens; ++t, to += row_bytes, from += v.row_bytes) {
      if (t + kAheadRows < tokens) PrefetchToL2(from + kAheadRows * v.row_bytes, width * DTypeBytes(kFrom));
      if constexpr (kTo == KvDType::kF32) {
        ForVectors(kLanes, width, [&](size_t i, size_t n) ATTND_STEP {
          StoreBytes(d, LoadAsF32<kFrom>(d, from, i, n), to + i * sizeof(float), n);
        });
      } else {
        Convert16<kTo, kFrom>(from, width, to);
      }
    }
  }
  (void)d;
}

// Puts elements of kBits bits, in the lower bits of the lanes, at place `place` of the units.
template <int kBits>
HWY_INLINE void MergeElements(VU elements, int place, std::byte* units, size_t n) {
  const DU du;
  const VU mask = hn::Set(du, ((uint32_t{1} << kBits) - 1) << (place * kBits));
  const VU merged = hn::BitwiseIfThenElse(mask, hn::ShiftLeftSame(elements, place * kBits), LoadBytes(du, units, n));
  StoreBytes(du, merged, units, n);
}

// BF16 V: pairs of tokens; a token that comes without its neighbour leaves it as it is.
template <DType kFrom>
void WriteVPairs(const BlockLayout& layout, std::byte* block, int slot, int tokens, const RowsView& v) {
  constexpr KvDType kTo = KvDType::kBf16;
  for (int p = 0; p < layout.num_panels; ++p) {
    const size_t width = layout.PanelWidth(p), column = size_t{kPanelColumns} * p;
    std::byte* panel = block + layout.PanelOffset(p);
    for (int t = 0; t < tokens;) {
      const std::byte* from = v.data + t * v.row_bytes;
      std::byte* units = panel + (slot + t) / 2 * width * sizeof(uint32_t);
      const int place = (slot + t) % 2;
      if (place == 0 && t + 1 < tokens) {
        for (int ahead = t + kAheadRows; ahead < std::min(t + kAheadRows + 2, tokens); ++ahead) {
          PrefetchToL2(v.data + ahead * v.row_bytes + column * DTypeBytes(kFrom), width * DTypeBytes(kFrom));
        }
        PackPairs<kTo, kFrom>(from, from + v.row_bytes, column, width, reinterpret_cast<uint32_t*>(units));
        t += 2;
        continue;
      }
      ForVectors(kLanes, width, [&](size_t i, size_t n) ATTND_STEP {
        MergeElements<16>(LoadAs16<kTo, kFrom>(from, column + i, n), place, units + i * sizeof(uint32_t), n);
      });
      ++t;
    }
  }
}

// INT8 V: quads of tokens; fewer leave their neighbours as they are.
template <DType kFrom>
void WriteVQuads(const BlockLayout& layout, std::byte* block, int slot, int tokens, const RowsView& v) {
  float* scales = reinterpret_cast<float*>(block + layout.VScalesOffset());
  const size_t row_bytes = layout.shape.value_dim * DTypeBytes(kFrom);
  alignas(64) int8_t rows[4][kMaxHeadDim];
  const hn::CappedTag<uint8_t, 64> d8;
  const hn::Rebind<uint8_t, DU> d8_units;
  const size_t lanes8 = hn::Lanes(d8);
  for (int t = 0; t < tokens;) {
    const int first = slot + t, place = first % 4, n = std::min(4 - place, tokens - t);
    for (int r = 0; r < n; ++r) {
      if (t + r + kAheadRows < tokens) PrefetchToL2(v.data + (t + r + kAheadRows) * v.row_bytes, row_bytes);
      scales[first + r] = QuantizeRow<kFrom>(v.data + (t + r) * v.row_bytes, layout.shape.value_dim, rows[place + r]);
    }
    for (int p = 0; p < layout.num_panels; ++p) {
      const size_t width = layout.PanelWidth(p), column = size_t{kPanelColumns} * p;
      std::byte* units = block + layout.PanelOffset(p) + first / 4 * width * sizeof(uint32_t);
      const auto row = [&](int r) { return reinterpret_cast<const uint8_t*>(rows[r]) + column; };
      size_t done = 0;
      if (n == 4) {
        for (; done + lanes8 <= width; done += lanes8) {
          hn::StoreInterleaved4(hn::LoadU(d8, row(0) + done), hn::LoadU(d8, row(1) + done),
                                hn::LoadU(d8, row(2) + done), hn::LoadU(d8, row(3) + done), d8,
                                reinterpret_cast<uint8_t*>(units) + done * 4);
        }
      }
      for (int r = place; r < place + n && done < width; ++r) {
        ForVectors(kLanes, width - done, [&](size_t i, size_t m) ATTND_STEP {
          const auto bytes = LoadBytes(d8_units, reinterpret_cast<const std::byte*>(row(r) + done + i), m);
          MergeElements<8>(hn::PromoteTo(DU(), bytes), r, units + (done + i) * sizeof(uint32_t), m);
        });
      }
    }
    t += n;
  }
}

template <DType kFrom>
void WriteKFrom(const BlockLayout& layout, std::byte* block, int slot, int tokens, const RowsView& k) {
  switch (layout.shape.dtype) {
    case KvDType::kF32:
      return WriteK<KvDType::kF32, kFrom>(layout, block, slot, tokens, k);
    case KvDType::kBf16:
      return WriteK<KvDType::kBf16, kFrom>(layout, block, slot, tokens, k);
    case KvDType::kF16:
      return WriteKF16<kFrom>(layout, block, slot, tokens, k);
    case KvDType::kInt8:
      return WriteK<KvDType::kInt8, kFrom>(layout, block, slot, tokens, k);
  }
}

template <DType kFrom>
void WriteVFrom(const BlockLayout& layout, std::byte* block, int slot, int tokens, const RowsView& v) {
  switch (layout.shape.dtype) {
    case KvDType::kF32:
      return WriteVRows<KvDType::kF32, kFrom>(layout, block, slot, tokens, v);
    case KvDType::kBf16:
      return WriteVPairs<kFrom>(layout, block, slot, tokens, v);
    case KvDType::kF16:
      return WriteVRows<KvDType::kF16, kFrom>(layout, block, slot, tokens, v);
    case KvDType::kInt8:
      return WriteVQuads<kFrom>(layout, block, slot, tokens, v);
  }
}

void WriteTokensImpl(const BlockLayout& layout, std::byte* block, int slot, int tokens, const RowsView& k,
                     const RowsView& v) {
  using Write = void (*)(const BlockLayout&, std::byte*, int, int, const RowsView&);
  constexpr Write kWriteK[] = {WriteKFrom<DType::kF32>, WriteKFrom<DType::kBf16>, WriteKFrom<DType::kF16>};
  constexpr Write kWriteV[] = {WriteVFrom<DType::kF32>, WriteVFrom<DType::kBf16>, WriteVFrom<DType::kF16>};
  // V's first rows come while K is written.
  const size_t v_row_bytes = layout.shape.value_dim * DTypeBytes(v.dtype);
  for (int t = 0; t < std::min(tokens, kAheadRows); ++t) PrefetchToL2(v.data + t * v.row_bytes, v_row_bytes);
  kWriteK[static_cast<int>(k.dtype)](layout, block, slot, tokens, k);
  kWriteV[static_cast<int>(v.dtype)](layout, block, slot, tokens, v);
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {
namespace {

HWY_EXPORT(WriteTokensImpl);

}  // namespace

void WriteTokens(const BlockLayout& layout, std::byte* block, int first_slot, int num_tokens, const RowsView& k,
                 const RowsView& v) {
  assert(first_slot >= 0 && num_tokens >= 0 && first_slot + num_tokens <= kBlockTokens);
  InitIsa();
  HWY_DYNAMIC_DISPATCH(WriteTokensImpl)(layout, block, first_slot, num_tokens, k, v);
}

}  // namespace attnd
#endif  // HWY_ONCE

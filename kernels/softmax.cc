#include "kernels/softmax.h"

#include <cmath>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/softmax.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "hwy/highway.h"
#include "kernels/bf16-inl.h"
#include "kernels/isa.h"
#include "kernels/prefetch.h"
#include "kernels/simd_math-inl.h"
#include "kernels/streaming.h"
#include "kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
using MF = hn::Mask<DF>;

constexpr size_t kLanes = hn::MaxLanes(DF());
constexpr int kBlockVectors = kBlockTokens / static_cast<int>(kLanes);
constexpr int kSums = 4;  // of independent partial sums: hides the latency of an addition
static_assert(kBlockVectors % kSums == 0);

// The lanes of vector `v` of a block that are allowed.
HWY_INLINE MF AllowedLanes(uint64_t word, int v) {
  const uint64_t bits = (word >> (v * kLanes)) & ((uint64_t{1} << kLanes) - 1);
  return hn::LoadMaskBits(DF(), reinterpret_cast<const uint8_t*>(&bits));
}

// Products times a positive scale and nothing else: the largest product is the largest score.
HWY_INLINE bool IsPlain(const Strip& strip) { return strip.softcap == 0 && strip.slopes == nullptr && strip.scale > 0; }

// The maximum of the row's scores (-inf: nothing allowed), and whether it and all products are finite.
struct RowMax {
  float max;
  bool finite;
};

struct MaxState {
  VF max[kSums];
  VF probe[kSums];  // becomes NaN if a product is infinite or NaN
};

template <bool kPlain, bool kWhole>
HWY_INLINE void ScoreVector(const Strip& strip, int row, int slot, int v, uint64_t word, VF& max, VF& probe) {
  const DF d;
  const int column = slot * kBlockTokens + v * static_cast<int>(kLanes);
  float* scores = strip.scores + row * kStripLd + column;
  VF s = hn::Load(d, scores);
  MF mask;
  if constexpr (!kWhole) {
    mask = AllowedLanes(word, v);
    s = hn::IfThenElseZero(mask, s);
  }
  probe = hn::MulAdd(s, hn::Zero(d), probe);
  if constexpr (!kPlain) {
    s = hn::Mul(s, hn::Set(d, strip.scale));
    if (strip.softcap != 0) {
      const VF cap = hn::Set(d, strip.softcap);
      s = hn::Mul(cap, Tanh(d, hn::Div(s, cap)));
    }
    if (strip.slopes != nullptr) {
      const float first = strip.distances[row * strip.slots + slot] + static_cast<float>(v * kLanes);
      s = hn::MulAdd(hn::Set(d, strip.slopes[row]), hn::Iota(d, first), s);
    }
    hn::Store(s, d, scores);
  }
  if constexpr (kWhole) {
    max = hn::Max(max, s);
  } else {
    max = hn::Max(max, hn::IfThenElse(mask, s, hn::Set(d, -HUGE_VALF)));
  }
}

template <bool kPlain, bool kWhole>
HWY_INLINE void ScoreBlock(const Strip& strip, int row, int slot, uint64_t word, MaxState& state) {
  for (int v = 0; v < kBlockVectors; v += kSums) {
    ATTND_UNROLL
    for (int i = 0; i < kSums; ++i) {
      ScoreVector<kPlain, kWhole>(strip, row, slot, v + i, word, state.max[i], state.probe[i]);
    }
  }
}

// Scores that are not plain are written back with scale, cap and slope.
template <bool kPlain>
HWY_INLINE RowMax ScoreRow(const Strip& strip, int row) {
  const DF d;
  const uint64_t* allowed = strip.allowed + row * strip.slots;
  MaxState state;
  ATTND_UNROLL
  for (int i = 0; i < kSums; ++i) {
    state.max[i] = hn::Set(d, -HUGE_VALF);
    state.probe[i] = hn::Zero(d);
  }
  uint64_t any_allowed = 0;
  for (int slot = 0; slot < strip.slots; ++slot) {
    const uint64_t word = allowed[slot];
    any_allowed |= word;
    if (word == ~uint64_t{0}) {
      ScoreBlock<kPlain, true>(strip, row, slot, word, state);
    } else if (word != 0) {
      ScoreBlock<kPlain, false>(strip, row, slot, word, state);
    }
  }
  const VF max = hn::Max(hn::Max(state.max[0], state.max[1]), hn::Max(state.max[2], state.max[3]));
  const VF probe = hn::Add(hn::Add(state.probe[0], state.probe[1]), hn::Add(state.probe[2], state.probe[3]));
  const float top = hn::ReduceMax(d, max) * (kPlain ? strip.scale : 1.0f);
  // -inf, though a key is allowed: all scores are below what f32 holds.
  const bool in_range = top < HUGE_VALF && (any_allowed == 0 || top > -HUGE_VALF);
  return {top, hn::AllFalse(d, hn::IsNaN(probe)) && in_range};
}

// Stores the weights of two neighbouring vectors in the format's place.
template <WeightFormat kFormat>
HWY_INLINE void StoreWeights(VF p0, VF p1, float* row, int column) {
  const DF d;
  const hn::RebindToUnsigned<DF> du;
  if constexpr (kFormat == WeightFormat::kF32 || kFormat == WeightFormat::kF32Coarse) {
    hn::Store(p0, d, row + column);
    hn::Store(p1, d, row + column + kLanes);
  } else if constexpr (kFormat == WeightFormat::kF32OfBf16) {
    const auto high = hn::Set(du, 0xFFFF0000u);
    const auto b0 = RoundBitsToBf16(du, hn::BitCast(du, p0)), b1 = RoundBitsToBf16(du, hn::BitCast(du, p1));
    hn::Store(hn::BitCast(d, hn::And(b0, high)), d, row + column);
    hn::Store(hn::BitCast(d, hn::And(b1, high)), d, row + column + kLanes);
  } else {
    // Two vectors' weights take the place of one vector's scores, at or before those that were just read.
    const hn::Repartition<uint16_t, DF> d16;
    uint16_t* to = reinterpret_cast<uint16_t*>(row) + column;
#if HWY_NATIVE_DOT_BF16
    // vcvtne2ps2bf16: the same rounding (weights are 0 or normal numbers, so it matters not that it flushes others).
    const hn::Repartition<hwy::bfloat16_t, DF> dbf;
    hn::Store(hn::BitCast(d16, hn::OrderedDemote2To(dbf, p0, p1)), d16, to);
#else
    const auto b0 = RoundBitsToBf16(du, hn::BitCast(du, p0)), b1 = RoundBitsToBf16(du, hn::BitCast(du, p1));
    hn::Store(hn::OrderedTruncate2To(d16, hn::ShiftRight<16>(b0), hn::ShiftRight<16>(b1)), d16, to);
#endif
  }
}

// Weights of one block's columns, added to the sums vector by vector in column order.
template <WeightFormat kFormat, ExpError kError, bool kWhole>
HWY_INLINE void WeighBlock(float* scores, int slot, uint64_t word, VF scale, VF max, VF (&sums)[kSums]) {
  const DF d;
  for (int v = 0; v < kBlockVectors; v += kSums) {
    const int column = slot * kBlockTokens + v * static_cast<int>(kLanes);
    VF p[kSums];
    ATTND_UNROLL
    for (int i = 0; i < kSums; ++i) {
      p[i] = Exp<kError>(d, hn::MulSub(hn::Load(d, scores + column + i * kLanes), scale, max));
      if constexpr (!kWhole) p[i] = hn::IfThenElseZero(AllowedLanes(word, v + i), p[i]);
      sums[i] = hn::Add(sums[i], p[i]);
    }
    StoreWeights<kFormat>(p[0], p[1], scores, column);
    StoreWeights<kFormat>(p[2], p[3], scores, column + 2 * static_cast<int>(kLanes));
  }
}

template <WeightFormat kFormat>
HWY_INLINE void ClearBlock(float* scores, int slot) {
  const VF zero = hn::Zero(DF());
  for (int v = 0; v < kBlockVectors; v += 2) {
    StoreWeights<kFormat>(zero, zero, scores, slot * kBlockTokens + v * static_cast<int>(kLanes));
  }
}

// Weights of a row in all its columns; returns their sum.
template <WeightFormat kFormat, ExpError kError>
HWY_INLINE float WeighRow(const Strip& strip, int row, float scale, float max) {
  const DF d;
  float* scores = strip.scores + row * kStripLd;
  const uint64_t* allowed = strip.allowed + row * strip.slots;
  const VF vscale = hn::Set(d, scale), vmax = hn::Set(d, max);
  VF sums[kSums];
  ATTND_UNROLL
  for (int i = 0; i < kSums; ++i) sums[i] = hn::Zero(d);
  constexpr size_t kSlotBytes = kPrefetchBytes / kRunBlocks;
  const bool prefetch = strip.ahead != nullptr && row < Strip::kAheadRows;
  for (int slot = 0; slot < strip.slots; ++slot) {
    const uint64_t word = allowed[slot];
    if (prefetch) PrefetchToL2(strip.ahead[row] + slot * kSlotBytes, kSlotBytes);
    if (word == ~uint64_t{0}) {
      WeighBlock<kFormat, kError, true>(scores, slot, word, vscale, vmax, sums);
    } else if (word == 0) {
      ClearBlock<kFormat>(scores, slot);
    } else {
      WeighBlock<kFormat, kError, false>(scores, slot, word, vscale, vmax, sums);
    }
  }
  return hn::ReduceSum(d, hn::Add(hn::Add(sums[0], sums[1]), hn::Add(sums[2], sums[3])));
}

void ScaleRow(const Strip& strip, int row) {
  const DF d;
  float* scores = strip.scores + row * kStripLd;
  for (int column = 0; column < strip.slots * kBlockTokens; column += static_cast<int>(kLanes)) {
    hn::Store(hn::Mul(hn::Load(d, scores + column), hn::Set(d, strip.scale)), d, scores + column);
  }
}

// The scale that remains to be applied to the row's scores in WeighRow. A plain row's is applied in one operation with
// the subtraction of the maximum, so that a score is rounded once: at +-6e4 a second rounding would cost 4e-3. The
// difference may then be above zero by half an ulp of the maximum, which exp must survive: beyond 2^20 it is not done.
HWY_INLINE float RemainingScale(const Strip& strip, int row, bool plain, float max) {
  if (!plain) return 1.0f;
  if (!(std::fabs(max) > 1048576.0f)) return strip.scale;
  ScaleRow(strip, row);
  return 1.0f;
}

template <WeightFormat kFormat>
int SoftmaxRows(const Strip& strip, RowSums* rows) {
  constexpr ExpError kError = kFormat == WeightFormat::kF32 ? ExpError::kUlp : ExpError::kCoarse;
  const bool plain = IsPlain(strip);
  int first_bad = -1;
  for (int row = 0; row < strip.rows; ++row) {
    const RowMax top = plain ? ScoreRow<true>(strip, row) : ScoreRow<false>(strip, row);
    if (!top.finite && first_bad < 0) first_bad = row;
    rows[row].max = top.max;
    if (top.max == -HUGE_VALF) {
      rows[row].sum = WeighRow<kFormat, kError>(strip, row, 1.0f, 0.0f);  // nothing allowed: all weights are 0
    } else {
      const float scale = RemainingScale(strip, row, plain, top.max);
      rows[row].sum = WeighRow<kFormat, kError>(strip, row, scale, top.max);
    }
  }
  return first_bad;
}

int SoftmaxStripImpl(const Strip& strip, WeightFormat format, RowSums* rows) {
  switch (format) {
    case WeightFormat::kF32:
      return SoftmaxRows<WeightFormat::kF32>(strip, rows);
    case WeightFormat::kF32Coarse:
      return SoftmaxRows<WeightFormat::kF32Coarse>(strip, rows);
    case WeightFormat::kF32OfBf16:
      return SoftmaxRows<WeightFormat::kF32OfBf16>(strip, rows);
    case WeightFormat::kBf16:
      return SoftmaxRows<WeightFormat::kBf16>(strip, rows);
  }
  return -1;
}

void ProbabilityStripImpl(const Strip& strip, const RowSums* rows) {
  const DF d;
  const bool plain = IsPlain(strip);
  for (int row = 0; row < strip.rows; ++row) {
    float* scores = strip.scores + row * kStripLd;
    if (!plain) ScoreRow<false>(strip, row);
    const bool empty = rows[row].sum == 0;
    const float max = empty ? 0.0f : rows[row].max;
    WeighRow<WeightFormat::kF32, ExpError::kUlp>(strip, row, RemainingScale(strip, row, plain, max), max);
    const VF sum = hn::Set(d, empty ? 1.0f : rows[row].sum);
    for (int column = 0; column < strip.slots * kBlockTokens; column += static_cast<int>(kLanes)) {
      hn::Store(hn::Div(hn::Load(d, scores + column), sum), d, scores + column);
    }
  }
}

// values = values * a + run_values * b for one row of every panel.
void MergeRow(size_t panel_stride, int panels, float* values, float a, const float* run_values, float b) {
  const DF d;
  const VF va = hn::Set(d, a), vb = hn::Set(d, b);
  for (int panel = 0; panel < panels; ++panel, values += panel_stride, run_values += panel_stride) {
    for (size_t i = 0; i < kPanelColumns; i += kLanes) {
      const VF joined = hn::MulAdd(hn::Load(d, values + i), va, hn::Mul(hn::Load(d, run_values + i), vb));
      hn::Store(joined, d, values + i);
    }
  }
}

bool NormalizeRowImpl(const float* values, size_t panel_stride, int columns, float factor, float sum, float* out) {
  const DF d;
  const VF vfactor = hn::Set(d, factor), vsum = hn::Set(d, sum), inverse = hn::Set(d, 1.0f / sum), zero = hn::Zero(d);
  VF probe = zero;
  for (int first = 0; first < columns; first += static_cast<int>(kLanes)) {
    const size_t n = HWY_MIN(columns - first, static_cast<int>(kLanes));
    const float* from = values + first / kPanelColumns * panel_stride + first % kPanelColumns;
    const VF x = hn::Mul(hn::LoadN(d, from, n), vfactor);
    // x / sum, rounded as a division is (Markstein): a third of its time.
    const VF quotient = hn::Mul(x, inverse);
    const VF exact = hn::MulAdd(hn::NegMulAdd(quotient, vsum, x), inverse, quotient);
    const VF result =
        hn::Add(exact, zero);  // -0 + 0 = 0: whether a sum of zeros ends as -0 depends on what was left out
    probe = hn::MulAdd(result, zero, probe);
    hn::StoreN(result, d, out + first, n);
  }
  return hn::AllFalse(d, hn::IsNaN(probe));
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {
namespace {

HWY_EXPORT(SoftmaxStripImpl);
HWY_EXPORT(ProbabilityStripImpl);
HWY_EXPORT(MergeRow);
HWY_EXPORT(NormalizeRowImpl);

}  // namespace

int SoftmaxStrip(const Strip& strip, WeightFormat format, RowSums* rows) {
  InitIsa();
  return HWY_DYNAMIC_DISPATCH(SoftmaxStripImpl)(strip, format, rows);
}

void ProbabilityStrip(const Strip& strip, const RowSums* rows) {
  InitIsa();
  HWY_DYNAMIC_DISPATCH(ProbabilityStripImpl)(strip, rows);
}

void MergeRun(int rows, int padded_rows, int panels, float* values, RowSums* sums, const float* run_values,
              const RowSums* run_sums) {
  InitIsa();
  const size_t stride = static_cast<size_t>(padded_rows) * kPanelColumns;
  for (int row = 0; row < rows; ++row, values += kPanelColumns, run_values += kPanelColumns) {
    if (run_sums[row].sum == 0) continue;
    if (sums[row].sum == 0) {
      for (int panel = 0; panel < panels; ++panel) {
        std::memcpy(values + panel * stride, run_values + panel * stride, kPanelColumns * sizeof(float));
      }
      sums[row] = run_sums[row];
      continue;
    }
    const float max = sums[row].max > run_sums[row].max ? sums[row].max : run_sums[row].max;
    const float a = std::exp(sums[row].max - max), b = std::exp(run_sums[row].max - max);
    HWY_DYNAMIC_DISPATCH(MergeRow)(stride, panels, values, a, run_values, b);
    sums[row] = {max, std::fma(sums[row].sum, a, run_sums[row].sum * b)};
  }
}

bool NormalizeRow(const float* values, size_t panel_stride, int columns, float factor, float sum, float* out) {
  InitIsa();
  return HWY_DYNAMIC_DISPATCH(NormalizeRowImpl)(values, panel_stride, columns, factor, sum, out);
}

}  // namespace attnd
#endif  // HWY_ONCE

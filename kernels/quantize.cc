#include "kernels/quantize.h"

#include <cfloat>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/quantize.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "hwy/highway.h"
#include "kernels/isa.h"
#include "kernels/row_vectors-inl.h"
#include "kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
using D16 = hn::Repartition<int16_t, DF>;

constexpr size_t kLanes = hn::MaxLanes(DF());

// Stores two neighbouring vectors, rounded, `n` elements of them, as elements i and following of a row.
template <S16Form kForm>
HWY_INLINE void StoreS16(VF x0, VF x1, size_t i, size_t n, std::byte* row, std::byte* low_row) {
  const D16 d16;
  const auto q = hn::OrderedDemote2To(d16, hn::NearestInt(x0), hn::NearestInt(x1));
  if constexpr (kForm == S16Form::kQuads) {
    hn::StoreN(hn::Per4LaneBlockShuffle<3, 1, 2, 0>(q), d16, reinterpret_cast<int16_t*>(row) + i, n);
  } else {
    const hn::Rebind<int8_t, D16> d8;
    const auto high = hn::ShiftRight<8>(hn::Add(q, hn::Set(d16, 128)));
    const auto low = hn::Sub(q, hn::ShiftLeft<8>(high));
    hn::StoreN(hn::DemoteTo(d8, high), d8, reinterpret_cast<int8_t*>(row) + i, n);
    hn::StoreN(hn::DemoteTo(d8, low), d8, reinterpret_cast<int8_t*>(low_row) + i, n);
  }
}

template <S16Form kForm>
HWY_INLINE float QuantizeQueryAs(const float* x, int dim, std::byte* q) {
  const DF d;
  VF top = hn::Zero(d);
  ForVectors(kLanes, dim, [&](size_t i, size_t n) ATTND_STEP { top = hn::Max(top, hn::Abs(hn::LoadN(d, x + i, n))); });
  const float largest = hn::ReduceMax(d, top), scale = largest / kMaxS16;
  const bool vanishes = !(scale >= FLT_MIN);
  const VF inverse = hn::Set(d, vanishes ? 0.0f : kMaxS16 / largest);
  ForVectors(2 * kLanes, dim, [&](size_t i, size_t n) ATTND_STEP {
    const VF x0 = hn::LoadN(d, x + i, HWY_MIN(n, kLanes));
    const VF x1 = n > kLanes ? hn::LoadN(d, x + i + kLanes, n - kLanes) : hn::Zero(d);
    StoreS16<kForm>(hn::Mul(x0, inverse), hn::Mul(x1, inverse), i, (n + 3) & ~size_t{3}, q, q + (dim + 3) / 4 * 4);
  });
  return vanishes ? 0.0f : scale;
}

float QuantizeQueryImpl(const float* x, int dim, S16Form form, std::byte* q) {
  return form == S16Form::kQuads ? QuantizeQueryAs<S16Form::kQuads>(x, dim, q)
                                 : QuantizeQueryAs<S16Form::kHalves>(x, dim, q);
}

template <S16Form kForm>
HWY_INLINE float QuantizeWeightsAs(float* weights, int slots, const float* const* v_scales) {
  const DF d;
  VF top = hn::Zero(d);
  for (int slot = 0; slot < slots; ++slot) {
    for (size_t i = 0; i < kBlockTokens; i += kLanes) {
      float* w = weights + slot * kBlockTokens + i;
      const VF scaled = hn::Mul(hn::Load(d, w), hn::LoadU(d, v_scales[slot] + i));
      hn::Store(scaled, d, w);
      top = hn::Max(top, scaled);
    }
  }
  const float largest = hn::ReduceMax(d, top);
  // A power of two keeps the inverse finite where all is tiny.
  const float lift = largest < 0x1p-64f ? 0x1p64f : 1.0f;
  const float inverse = largest == 0 ? 0.0f : kMaxS16 / (largest * lift);
  const VF vlift = hn::Set(d, lift), vinverse = hn::Set(d, inverse);
  std::byte* to = reinterpret_cast<std::byte*>(weights);  // never beyond what was read, but for lo, which waits
  HWY_ALIGN std::byte low[kRunTokens];
  // What rounding takes from one weight the lane's next one gets: many equal small weights beside a large one would all
  // err in the same direction. A weight of 0 stays 0 and hands on what it got. Four lines of it, for each step waits
  // for the one before.
  constexpr size_t kLines = 4;
  VF rest[kLines], rounded[kLines];
  ATTND_UNROLL
  for (size_t v = 0; v < kLines; ++v) rest[v] = hn::Zero(d);
  for (size_t i = 0; i < static_cast<size_t>(slots) * kBlockTokens; i += kLines * kLanes) {
    ATTND_UNROLL
    for (size_t v = 0; v < kLines; ++v) {
      const VF x = hn::MulAdd(hn::Mul(hn::Load(d, weights + i + v * kLanes), vlift), vinverse, rest[v]);
      rounded[v] = hn::Round(x);
      rest[v] = hn::Sub(x, rounded[v]);
    }
    ATTND_UNROLL
    for (size_t v = 0; v < kLines; v += 2) {
      StoreS16<kForm>(rounded[v], rounded[v + 1], i + v * kLanes, 2 * kLanes, to, low);
    }
  }
  if constexpr (kForm == S16Form::kHalves) std::memcpy(to + kWeightHalf, low, slots * kBlockTokens);
  return largest / kMaxS16;
}

float QuantizeWeightsImpl(float* weights, int slots, const float* const* v_scales, S16Form form) {
  return form == S16Form::kQuads ? QuantizeWeightsAs<S16Form::kQuads>(weights, slots, v_scales)
                                 : QuantizeWeightsAs<S16Form::kHalves>(weights, slots, v_scales);
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {
namespace {

HWY_EXPORT(QuantizeQueryImpl);
HWY_EXPORT(QuantizeWeightsImpl);

}  // namespace

float QuantizeQuery(const float* x, int dim, S16Form form, std::byte* q) {
  InitIsa();
  return HWY_DYNAMIC_DISPATCH(QuantizeQueryImpl)(x, dim, form, q);
}

float QuantizeWeights(float* weights, int slots, const float* const* v_scales, S16Form form) {
  InitIsa();
  return HWY_DYNAMIC_DISPATCH(QuantizeWeightsImpl)(weights, slots, v_scales, form);
}

}  // namespace attnd
#endif  // HWY_ONCE

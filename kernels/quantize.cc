#include "kernels/quantize.h"

#include <cfloat>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/quantize.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "hwy/highway.h"
#include "kernels/isa.h"
#include "kernels/row_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
using D16 = hn::Repartition<int16_t, DF>;

constexpr size_t kLanes = hn::MaxLanes(DF());

// Two neighbouring vectors, rounded.
HWY_INLINE hn::Vec<D16> PackQuads(VF x0, VF x1) {
  const auto q = hn::OrderedDemote2To(D16(), hn::NearestInt(x0), hn::NearestInt(x1));
  return hn::Per4LaneBlockShuffle<3, 1, 2, 0>(q);
}

float QuantizeQueryImpl(const float* x, int dim, int16_t* q) {
  const DF d;
  VF top = hn::Zero(d);
  ForVectors(kLanes, dim, [&](size_t i, size_t n) ATTND_STEP { top = hn::Max(top, hn::Abs(hn::LoadN(d, x + i, n))); });
  const float largest = hn::ReduceMax(d, top), scale = largest / kMaxS16;
  const bool vanishes = !(scale >= FLT_MIN);
  const VF inverse = hn::Set(d, vanishes ? 0.0f : kMaxS16 / largest);
  ForVectors(2 * kLanes, dim, [&](size_t i, size_t n) ATTND_STEP {
    const VF x0 = hn::LoadN(d, x + i, HWY_MIN(n, kLanes));
    const VF x1 = n > kLanes ? hn::LoadN(d, x + i + kLanes, n - kLanes) : hn::Zero(d);
    hn::StoreN(PackQuads(hn::Mul(x0, inverse), hn::Mul(x1, inverse)), D16(), q + i, (n + 3) & ~size_t{3});
  });
  return vanishes ? 0.0f : scale;
}

float QuantizeWeightsImpl(float* weights, int slots, const float* const* v_scales) {
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
  int16_t* to = reinterpret_cast<int16_t*>(weights);  // never beyond what was read
  for (size_t i = 0; i < static_cast<size_t>(slots) * kBlockTokens; i += 2 * kLanes) {
    const VF w0 = hn::Mul(hn::Load(d, weights + i), vlift), w1 = hn::Mul(hn::Load(d, weights + i + kLanes), vlift);
    hn::StoreU(PackQuads(hn::Mul(w0, vinverse), hn::Mul(w1, vinverse)), D16(), to + i);
  }
  return largest / kMaxS16;
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

float QuantizeQuery(const float* x, int dim, int16_t* q) {
  InitIsa();
  return HWY_DYNAMIC_DISPATCH(QuantizeQueryImpl)(x, dim, q);
}

float QuantizeWeights(float* weights, int slots, const float* const* v_scales) {
  InitIsa();
  return HWY_DYNAMIC_DISPATCH(QuantizeWeightsImpl)(weights, slots, v_scales);
}

}  // namespace attnd
#endif  // HWY_ONCE

// Rounding to bf16 in integer arithmetic: the same bits on every target, denormals included. Per-target include.
#if defined(ATTND_KERNELS_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_BF16_INL_H_
#undef ATTND_KERNELS_BF16_INL_H_
#else
#define ATTND_KERNELS_BF16_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Bits of the f32 values rounded to bf16, in the upper halves (the lower halves are not cleared).
template <class DU, class VU>
HWY_INLINE VU RoundBitsToBf16(DU du, VU bits) {
  const VU lsb = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  return hn::Add(bits, hn::Add(lsb, hn::Set(du, 0x7FFF)));
}

// As above for values that may be NaN: adding could carry a NaN's payload into infinity or zero, so a NaN is truncated
// and made quiet.
template <class DU, class VU>
HWY_INLINE VU RoundAnyBitsToBf16(DU du, VU bits) {
  const VU magnitude = hn::And(bits, hn::Set(du, 0x7FFFFFFF));
  const auto is_nan = hn::Gt(magnitude, hn::Set(du, 0x7F800000));
  return hn::IfThenElse(is_nan, hn::Or(bits, hn::Set(du, 0x00400000)), RoundBitsToBf16(du, bits));
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#endif  // ATTND_KERNELS_BF16_INL_H_

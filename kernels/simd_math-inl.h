// exp and tanh for the softmax, a few ulp. Per-target include.
#if defined(ATTND_KERNELS_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_SIMD_MATH_INL_H_
#undef ATTND_KERNELS_SIMD_MATH_INL_H_
#else
#define ATTND_KERNELS_SIMD_MATH_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// exp(x) for x <= 88; exactly 0 below -87, where the result would leave the normal numbers. Not for NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 is split so that n times its upper part is exact; polynomial of Cephes.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Exp(D d, V x) {
  const hn::RebindToUnsigned<D> du;
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum.
  const V magic = hn::Set(d, 12582912.0f);
  const V shifted = hn::MulAdd(x, hn::Set(d, 1.44269504088896341f), magic);
  const V n = hn::Sub(shifted, magic);
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  V p = hn::MulAdd(hn::Set(d, 1.9875691500e-4f), r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  p = hn::MulAdd(hn::Mul(p, r), r, hn::Add(r, hn::Set(d, 1.0f)));
  // n is within -126..127 where the result is used, so it can be added to the exponent.
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(du, shifted));
  const V scaled = hn::BitCast(d, hn::Add(hn::BitCast(du, p), exponent));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0f)), scaled);
}

// tanh(x), odd, |error| of an ulp or two: a polynomial (Cephes) near zero, where 1 - 2 / (e^2x + 1) would cancel.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V Tanh(D d, V x) {
  const V magnitude = hn::Abs(x);
  const V z = hn::Mul(x, x);
  V p = hn::MulAdd(hn::Set(d, -5.70498872745e-3f), z, hn::Set(d, 2.06390887954e-2f));
  p = hn::MulAdd(p, z, hn::Set(d, -5.37397155531e-2f));
  p = hn::MulAdd(p, z, hn::Set(d, 1.33314422036e-1f));
  p = hn::MulAdd(p, z, hn::Set(d, -3.33332819422e-1f));
  const V small = hn::MulAdd(hn::Mul(p, z), x, x);
  const V limited = hn::Min(magnitude, hn::Set(d, 10.0f));  // tanh(10) is 1 in f32
  const V e = Exp(d, hn::Add(limited, limited));
  const V one = hn::Set(d, 1.0f);
  const V large = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(e, one)));
  return hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.625f)), small, hn::CopySign(large, x));
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#endif  // ATTND_KERNELS_SIMD_MATH_INL_H_

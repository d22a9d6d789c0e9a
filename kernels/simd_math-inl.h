// exp and tanh for the softmax and its gradients, a few ulp. Per-target include.
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

// How exact exp is: relative error below 1.1e-7, or below 2.9e-6 for weights that are rounded to fewer bits anyway.
enum class ExpError { kUlp, kCoarse };

// exp(x) for x <= 88; exactly 1 at 0, exactly 0 below -87, where the result would leave the normal numbers. Not for
// NaN. x log2(e) = n + r with |r| <= 1/2; 2^r by a polynomial that is minimax in the relative error among those that
// are 1 at 0 (Remez, coefficients by linear programming). The rounding of log2(e) costs 2e-8 |x|, which matters only
// where exp(x) is small beside the sum it joins.
template <ExpError kError = ExpError::kUlp, class D, class V = hn::Vec<D>>
HWY_INLINE V Exp(D d, V x) {
  const hn::RebindToUnsigned<D> du;
  const V log2e = hn::Set(d, 1.44269504088896341f);
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum.
  const V magic = hn::Set(d, 12582912.0f);
  const V shifted = hn::MulAdd(x, log2e, magic);
  const V r = hn::MulSub(x, log2e, hn::Sub(shifted, magic));
  V p;
  if constexpr (kError == ExpError::kUlp) {
    p = hn::MulAdd(hn::Set(d, 1.32647273e-3f), r, hn::Set(d, 9.67151299e-3f));
    p = hn::MulAdd(p, r, hn::Set(d, 5.55073358e-2f));
    p = hn::MulAdd(p, r, hn::Set(d, 2.40222424e-1f));
    p = hn::MulAdd(p, r, hn::Set(d, 6.93147004e-1f));
  } else {
    p = hn::MulAdd(hn::Set(d, 9.58285108e-3f), r, hn::Set(d, 5.59064224e-2f));
    p = hn::MulAdd(p, r, hn::Set(d, 2.40240991e-1f));
    p = hn::MulAdd(p, r, hn::Set(d, 6.93124175e-1f));
  }
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  // n is within -126..127 where the result is used, so it can be added to the exponent.
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(du, shifted));
  const V scaled = hn::BitCast(d, hn::Add(hn::BitCast(du, p), exponent));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0f)), scaled);
}

// exp(x) in f64 for x <= 700, relative error below 1e-14; exactly 0 below -700. Not for NaN. x = n ln 2 + r with ln 2
// in two parts, and 2^n times the Taylor polynomial of e^r: for |r| <= ln 2 / 2 the first term left out, r^12 / 12!, is
// below 7e-15.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpF64(D d, V x) {
  const hn::RebindToUnsigned<D> du;
  // Adding 1.5 * 2^52 rounds to an integer and leaves it in the low bits of the sum.
  const V magic = hn::Set(d, 6755399441055744.0);
  const V shifted = hn::MulAdd(x, hn::Set(d, 1.4426950408889634), magic);
  const V n = hn::Sub(shifted, magic);
  V r = hn::NegMulAdd(n, hn::Set(d, 0.69314718036912382), x);  // ln 2 to 33 bits: n times it is exact
  r = hn::NegMulAdd(n, hn::Set(d, 1.9082149292705877e-10), r);
  V p = hn::MulAdd(hn::Set(d, 1.0 / 39916800), r, hn::Set(d, 1.0 / 3628800));
  for (const double factorial : {362880.0, 40320.0, 5040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0}) {
    p = hn::MulAdd(p, r, hn::Set(d, 1.0 / factorial));
  }
  const auto exponent = hn::ShiftLeft<52>(hn::BitCast(du, shifted));
  const V scaled = hn::BitCast(d, hn::Add(hn::BitCast(du, p), exponent));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -700.0)), scaled);
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

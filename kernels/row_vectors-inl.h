// Vectors of a row whose memory may be misaligned and must not be touched beyond its end. Per-target include.
#if defined(ATTND_KERNELS_ROW_VECTORS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_ROW_VECTORS_INL_H_
#undef ATTND_KERNELS_ROW_VECTORS_INL_H_
#else
#define ATTND_KERNELS_ROW_VECTORS_INL_H_
#endif

#include <cstddef>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/types.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// For the lambdas below. They are called in two places, and a call per vector would cost more than the vector.
#ifndef ATTND_STEP
#define ATTND_STEP HWY_ATTR __attribute__((always_inline))
#endif

// Calls step(i, n) for every whole vector and once for the rest.
template <class Step>
HWY_INLINE void ForVectors(size_t lanes, size_t count, const Step& step) {
  size_t i = 0;
  for (; i + lanes <= count; i += lanes) step(i, lanes);
  if (i < count) step(i, count - i);
}

// Elements pass through a small aligned buffer at a row's end only, where a vector would reach too far. The lanes
// behind them are zero.
template <class D, class T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> LoadBytes(D d, const std::byte* from, size_t n) {
  if (n == hn::Lanes(d)) return hn::LoadU(d, reinterpret_cast<const T*>(from));
  HWY_ALIGN T buffer[hn::MaxLanes(d)] = {};
  std::memcpy(buffer, from, n * sizeof(T));
  return hn::Load(d, buffer);
}

template <class D, class T = hn::TFromD<D>>
HWY_INLINE void StoreBytes(D d, hn::Vec<D> v, std::byte* to, size_t n) {
  if (n == hn::Lanes(d)) return hn::StoreU(v, d, reinterpret_cast<T*>(to));
  HWY_ALIGN T buffer[hn::MaxLanes(d)];
  hn::Store(v, d, buffer);
  std::memcpy(to, buffer, n * sizeof(T));
}

// `n` elements of a row from the i-th on, as f32. Exact.
template <DType kFrom, class D>
HWY_INLINE hn::Vec<D> LoadAsF32(D d, const std::byte* row, size_t i, size_t n) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> d16;
  const hn::Rebind<hwy::float16_t, D> df16;
  if constexpr (kFrom == DType::kF32) {
    return LoadBytes(d, row + i * sizeof(float), n);
  } else if constexpr (kFrom == DType::kBf16) {
    const auto bits = hn::PromoteTo(du, LoadBytes(d16, row + i * sizeof(uint16_t), n));
    return hn::BitCast(d, hn::ShiftLeft<16>(bits));
  } else {
    return hn::PromoteTo(d, hn::BitCast(df16, LoadBytes(d16, row + i * sizeof(uint16_t), n)));
  }
  (void)du, (void)d16, (void)df16;
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#endif  // ATTND_KERNELS_ROW_VECTORS_INL_H_

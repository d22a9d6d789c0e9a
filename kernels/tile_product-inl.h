// A product of tiles that are packed and in cache, for the gradients: f32 or f64, either operand order of A. Per-target
// include.
#if defined(ATTND_KERNELS_TILE_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTND_KERNELS_TILE_PRODUCT_INL_H_
#undef ATTND_KERNELS_TILE_PRODUCT_INL_H_
#else
#define ATTND_KERNELS_TILE_PRODUCT_INL_H_
#endif

#include <cstddef>

#include "hwy/highway.h"
#include "kernels/tile_operands.h"
#include "kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

template <bool kAdd, size_t kVectors, class T>
HWY_INLINE void ProductOfRows(const TileOperands<T>& x, size_t m, size_t n) {
  const hn::ScalableTag<T> d;
  const size_t lanes = hn::Lanes(d);
  T* c = x.c + m * x.c_ld + n;
  hn::Vec<decltype(d)> sums[kTileProductRows][kVectors];
  ATTND_UNROLL
  for (size_t i = 0; i < kTileProductRows; ++i) {
    ATTND_UNROLL
    for (size_t j = 0; j < kVectors; ++j) sums[i][j] = kAdd ? hn::Load(d, c + i * x.c_ld + j * lanes) : hn::Zero(d);
  }
  const T* a = x.a + m * x.a_row;
  const T* b = x.b + n;
  for (size_t k = 0; k < x.k; ++k, a += x.a_step, b += x.b_ld) {
    hn::Vec<decltype(d)> columns[kVectors];
    ATTND_UNROLL
    for (size_t j = 0; j < kVectors; ++j) columns[j] = hn::Load(d, b + j * lanes);
    ATTND_UNROLL
    for (size_t i = 0; i < kTileProductRows; ++i) {
      const auto row = hn::Set(d, a[i * x.a_row]);
      ATTND_UNROLL
      for (size_t j = 0; j < kVectors; ++j) sums[i][j] = hn::MulAdd(row, columns[j], sums[i][j]);
    }
  }
  ATTND_UNROLL
  for (size_t i = 0; i < kTileProductRows; ++i) {
    ATTND_UNROLL
    for (size_t j = 0; j < kVectors; ++j) hn::Store(sums[i][j], d, c + i * x.c_ld + j * lanes);
  }
}

template <bool kAdd, class T>
HWY_INLINE void TileProduct(const TileOperands<T>& x) {
  const size_t lanes = hn::Lanes(hn::ScalableTag<T>());
  size_t n = 0;
  for (; n + 2 * lanes <= x.n; n += 2 * lanes) {
    for (size_t m = 0; m < x.m; m += kTileProductRows) ProductOfRows<kAdd, 2>(x, m, n);
  }
  if (n < x.n) {
    for (size_t m = 0; m < x.m; m += kTileProductRows) ProductOfRows<kAdd, 1>(x, m, n);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#endif  // ATTND_KERNELS_TILE_PRODUCT_INL_H_

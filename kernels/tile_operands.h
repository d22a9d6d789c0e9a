// The operands of tile_product-inl.h.
#ifndef ATTND_KERNELS_TILE_OPERANDS_H_
#define ATTND_KERNELS_TILE_OPERANDS_H_

#include <cstddef>

namespace attnd {

// c[m][n] (+)= sum over k, in order, of a[m][k] * b[k][n].
template <class T>
struct TileOperands {
  const T* a = nullptr;  // element (m, k) at a[m * a_row + k * a_step]
  size_t a_row = 0, a_step = 0;
  const T* b = nullptr;  // [k][b_ld], aligned
  size_t b_ld = 0;
  T* c = nullptr;  // [m][c_ld], aligned
  size_t c_ld = 0;
  size_t m = 0;  // a multiple of kTileProductRows
  size_t n = 0;  // a multiple of the vector's lanes
  size_t k = 0;
};

inline constexpr size_t kTileProductRows = 4;  // x 2 vectors: 8 sums hide an FMA's latency

}  // namespace attnd

#endif  // ATTND_KERNELS_TILE_OPERANDS_H_

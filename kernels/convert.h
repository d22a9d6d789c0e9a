// Conversions of rows of elements between the caller's types and the kernels' own. Callers' rows may be misaligned.
#ifndef ATTND_KERNELS_CONVERT_H_
#define ATTND_KERNELS_CONVERT_H_

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace attnd {

// A bf16 is the upper half of an f32; the kernels carry it as uint16_t.
inline float Bf16ToFloat(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  __builtin_memcpy(&value, &wide, sizeof(value));
  return value;
}

// Exact: every value of the narrow types is an f32.
void WidenRow(const std::byte* from, DType dtype, int count, float* to);

// To nearest, ties to even; NaN stays NaN, what is beyond the largest finite value becomes infinite.
void NarrowRow(const float* from, int count, DType dtype, std::byte* to);
void RoundRowToBf16(const float* from, int count, uint16_t* to);

// From any type to bf16, rounded as above.
void RowToBf16(const std::byte* from, DType dtype, int count, uint16_t* to);

// bf16 VNNI pairs [pairs][columns][2] to f32 rows [2 * pairs][columns].
void WidenPairs(const uint16_t* from, int pairs, int columns, float* to);

}  // namespace attnd

#endif  // ATTND_KERNELS_CONVERT_H_

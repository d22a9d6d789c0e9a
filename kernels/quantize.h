// Q and the weights (for K and V see write_tokens.cc) as s16 for products with INT8 blocks: 8 bits would cost more than
// the numeric contract allows, where one token dominates and many small ones add up. Sums of s16 x s8 in s32 are exact,
// whatever their order.
#ifndef ATTND_KERNELS_QUANTIZE_H_
#define ATTND_KERNELS_QUANTIZE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/block_layout.h"
#include "kernels/softmax.h"

namespace attnd {

// The largest magnitude. Not 32767: split as 256 * hi + lo, both halves are s8.
inline constexpr int kMaxS16 = 32512;  // a weight may come out one larger, by what the one before it left over
inline constexpr int kMaxS8 = 127;
static_assert(int64_t{kMaxS16} * kMaxS8 * kMaxHeadDim <= INT32_MAX, "a score's sum must not overflow");
static_assert(int64_t{kMaxS16 + 1} * kMaxS8 * kRunTokens <= INT32_MAX, "a value's sum must not overflow");

// How the products want them; rounded to nearest, ties to even, in both.
enum class S16Form : uint8_t {
  kQuads,   // StreamMode::kInt8: quads in the order 0 2 1 3
  kHalves,  // StreamMode::kAmxInt8: x = 256 * hi + lo as s8; first a row of hi, then one of lo
};

// x is about scale * q with scale = max|x| / kMaxS16, which is returned; all is zero where it would not be a normal
// number. Writes whole quads, padded with zeros: two bytes an element, in kHalves a byte of hi for each and then one of
// lo.
float QuantizeQuery(const float* x, int dim, S16Form form, std::byte* q);

// Distance of a row's lo from its hi in the strip.
inline constexpr size_t kWeightHalf = kStripLd * sizeof(float) / 2;

// A row's weights (f32, `slots` blocks of 64) times the scales of V of each block; s16 in their place, packed from the
// row's start, or lo from kWeightHalf bytes behind it. Returns the scale.
float QuantizeWeights(float* weights, int slots, const float* const* v_scales, S16Form form);

}  // namespace attnd

#endif  // ATTND_KERNELS_QUANTIZE_H_

#include "client/cpp/types.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace attnd::client {
namespace {

// K29: round to nearest, ties to even; NaN stays NaN.
TEST(BFloat16, RoundsToNearestEven) {
  EXPECT_EQ(ToBFloat16(0.2691408770292272f).bits, 0x3E8A);
  EXPECT_EQ(ToFloat(ToBFloat16(1.00390625f)), 1.0f);
  EXPECT_EQ(ToFloat(ToBFloat16(1.01171875f)), 1.015625f);
  EXPECT_EQ(ToFloat(ToBFloat16(0.1f)), 0.10009765625f);
  EXPECT_EQ(ToFloat(ToBFloat16(3.4e38f)), INFINITY);
  EXPECT_TRUE(std::isnan(ToFloat(ToBFloat16(std::bit_cast<float>(0x7F800001)))));
}

TEST(Float16, EveryHalfComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<uint16_t>(bits)};
    const float wide = ToFloat(half);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(ToFloat(ToFloat16(wide))));
    } else {
      EXPECT_EQ(ToFloat16(wide).bits, half.bits) << bits;
    }
  }
}

TEST(Float16, RoundsToNearestEven) {
  EXPECT_EQ(ToFloat16(65504.0f).bits, 0x7BFF);
  EXPECT_EQ(ToFloat16(65519.0f).bits, 0x7BFF);
  EXPECT_EQ(ToFloat16(65520.0f).bits, 0x7C00);
  EXPECT_EQ(ToFloat16(1.0f + 0x1p-11f).bits, 0x3C00);            // a tie, to even
  EXPECT_EQ(ToFloat16(1.0f + 3 * 0x1p-11f).bits, 0x3C02);        // a tie, to even
  EXPECT_EQ(ToFloat16(0x1p-14f - 0x1p-26f).bits, 0x0400);        // rounds up out of the subnormals
  EXPECT_EQ(ToFloat16(0x1p-25f).bits, 0x0000);                   // a tie, to even
  EXPECT_EQ(ToFloat16(std::nextafter(0x1p-25f, 1.0f)).bits, 1);  // the smallest subnormal
  EXPECT_EQ(ToFloat16(-0.0f).bits, 0x8000);
}

TEST(Tensor, WidensToFloats) {
  Tensor tensor{DType::kBf16, std::string("\x80\x3F\x00\x40", 4)};
  EXPECT_EQ(tensor.size(), 2u);
  EXPECT_EQ(tensor.ToFloats(), (std::vector<float>{1.0f, 2.0f}));
}

TEST(TensorView, TakesItsDtypeFromTheElements) {
  const std::vector<BFloat16> values(3);
  const TensorView view = values;
  EXPECT_EQ(view.dtype(), DType::kBf16);
  EXPECT_EQ(view.bytes(), 6u);
  EXPECT_TRUE(TensorView().empty());
}

TEST(BitMask, IsPackedWithoutPaddingLeastSignificantBitFirst) {
  BitMask mask = BitMask::Filled(3, 3, false);
  EXPECT_EQ(mask.bits.size(), 2u);
  mask.Set(0, 0, true);
  mask.Set(2, 2, true);  // bit 8
  EXPECT_EQ(mask.bits, std::string("\x01\x01", 2));
  EXPECT_TRUE(mask.Get(2, 2));
  mask.Set(2, 2, false);
  EXPECT_FALSE(mask.Get(2, 2));
  EXPECT_EQ(BitMask::Filled(1, 9, true).bits, std::string("\xFF\x01", 2));
}

}  // namespace
}  // namespace attnd::client

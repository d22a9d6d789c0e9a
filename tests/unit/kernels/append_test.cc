// Where WriteTokens puts every element, the rounding to bf16, copies, and the search for values that are not finite.
#include "kernels/append.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/aligned_buffer.h"
#include "kernels/convert.h"
#include "tests/unit/kernels/harness.h"

namespace attnd::testing {
namespace {

// The layout of block_layout.h, element by element.
float F16ToFloat(uint16_t bits) {
  float value;
  WidenRow(reinterpret_cast<const std::byte*>(&bits), DType::kF16, 1, &value);
  return value;
}

float Scale(const std::byte* block, size_t offset, int token) {
  return reinterpret_cast<const float*>(block + offset)[token];
}

float KAt(const BlockLayout& layout, const std::byte* block, int token, int dim) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(block);
  switch (layout.shape.dtype) {
    case KvDType::kF32:
      return reinterpret_cast<const float*>(block)[dim * kBlockTokens + token];
    case KvDType::kBf16:
      return Bf16ToFloat(halves[(dim / 2 * kBlockTokens + token) * 2 + dim % 2]);
    case KvDType::kF16:
      return F16ToFloat(halves[dim * kBlockTokens + token]);
    case KvDType::kInt8:
      break;
  }
  const size_t scales = (layout.shape.head_dim + 3) / 4 * size_t{kBlockTokens} * 4;
  const int q = reinterpret_cast<const int8_t*>(block)[(dim / 4 * kBlockTokens + token) * 4 + dim % 4];
  return Scale(block, scales, token) * static_cast<float>(q);
}

float VAt(const BlockLayout& layout, const std::byte* block, int token, int column) {
  const int panel = column / kPanelColumns, width = layout.PanelWidth(panel), c = column % kPanelColumns;
  const std::byte* base = block + layout.PanelOffset(panel);
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(base);
  switch (layout.shape.dtype) {
    case KvDType::kF32:
      return reinterpret_cast<const float*>(base)[token * width + c];
    case KvDType::kBf16:
      return Bf16ToFloat(halves[(token / 2 * width + c) * 2 + token % 2]);
    case KvDType::kF16:
      return F16ToFloat(halves[token * width + c]);
    case KvDType::kInt8:
      break;
  }
  const int q = reinterpret_cast<const int8_t*>(base)[(token / 4 * width + c) * 4 + token % 4];
  return Scale(block, layout.k_bytes, token) * static_cast<float>(q);
}

struct Rows {
  int dim;
  DType dtype;
  size_t row_bytes;
  std::vector<std::byte> bytes;
  std::vector<float> values;  // [tokens][dim]

  Rows(int tokens, int dim, DType dtype, unsigned seed) : dim(dim), dtype(dtype) {
    row_bytes = dim * DTypeBytes(dtype) + 7;  // odd distances and addresses
    bytes.resize(1 + tokens * row_bytes);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int t = 0; t < tokens; ++t) {
      for (int d = 0; d < dim; ++d) {
        values.push_back(Rounded(normal(random), dtype));
        NarrowRow(&values.back(), 1, dtype, bytes.data() + 1 + t * row_bytes + d * DTypeBytes(dtype));
      }
    }
  }
  RowsView From(int token) const { return {bytes.data() + 1 + token * row_bytes, row_bytes, dtype}; }
};

void CheckBlock(const BlockLayout& layout, const std::byte* block, const Rows& k, const Rows& v, int tokens) {
  const std::vector<float> stored_k = Stored(k.values, k.dim, layout.shape.dtype);
  const std::vector<float> stored_v = Stored(v.values, v.dim, layout.shape.dtype);
  for (int t = 0; t < tokens; ++t) {
    for (int d = 0; d < k.dim; ++d) {
      ASSERT_EQ(KAt(layout, block, t, d), stored_k[t * k.dim + d]) << "k " << t << " " << d;
    }
    for (int c = 0; c < v.dim; ++c) {
      ASSERT_EQ(VAt(layout, block, t, c), stored_v[t * v.dim + c]) << "v " << t << " " << c;
    }
  }
  for (int t = tokens; t < kBlockTokens; ++t) {
    for (int c = 0; c < v.dim; ++c) ASSERT_EQ(VAt(layout, block, t, c), 0.0f) << "unwritten v " << t << " " << c;
  }
}

class AppendTest : public ::testing::TestWithParam<KvDType> {};

TEST_P(AppendTest, EveryElementInItsPlace) {
  for (const auto& [head_dim, value_dim] :
       {std::pair{1, 1}, {3, 7}, {4, 64}, {33, 65}, {64, 17}, {127, 255}, {256, 256}}) {
    for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
      const BlockLayout layout({head_dim, value_dim, GetParam()});
      const Rows k(kBlockTokens, head_dim, dtype, 1), v(kBlockTokens, value_dim, dtype, 2);
      // In steps of all kinds: one by one, odd and even, from odd and even slots, whole blocks.
      for (const std::vector<int>& steps : {std::vector<int>{1}, {2}, {3}, {5, 2, 1}, {16}, {17}, {64}, {63, 1}}) {
        for (const int first_slot : {0, steps[0]}) {
          AlignedBuffer memory(layout.block_bytes);
          std::byte* block = memory.As<std::byte>();
          std::memset(block, 0xFF, layout.block_bytes);
          InitBlock(layout, block, first_slot);
          for (int token = 0, i = 0; token < kBlockTokens; ++i) {
            const int count = std::min(steps[i % steps.size()], kBlockTokens - token);
            WriteTokens(layout, block, token, count, k.From(token), v.From(token));
            token += count;
            if (token < 20) CheckBlock(layout, block, k, v, token);
          }
          CheckBlock(layout, block, k, v, kBlockTokens);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(AppendTest, RewritingATokenLeavesItsNeighbours) {
  const BlockLayout layout({33, 70, GetParam()});
  Rows k(kBlockTokens, 33, DType::kF32, 1), v(kBlockTokens, 70, DType::kF32, 2);
  const Rows k2(kBlockTokens, 33, DType::kF32, 3), v2(kBlockTokens, 70, DType::kF32, 4);
  AlignedBuffer memory(layout.block_bytes);
  WriteTokens(layout, memory.As<std::byte>(), 0, kBlockTokens, k.From(0), v.From(0));
  for (const int token : {0, 1, 30, 63}) {
    WriteTokens(layout, memory.As<std::byte>(), token, 1, k2.From(token), v2.From(token));
    std::copy_n(&k2.values[token * 33], 33, &k.values[token * 33]);
    std::copy_n(&v2.values[token * 70], 70, &v.values[token * 70]);
    CheckBlock(layout, memory.As<std::byte>(), k, v, kBlockTokens);
  }
}

TEST_P(AppendTest, CopyTokensCopiesExactlyThose) {
  for (const auto& [head_dim, value_dim] : {std::pair{3, 7}, {64, 64}, {33, 130}}) {
    const BlockLayout layout({head_dim, value_dim, GetParam()});
    const Rows k(kBlockTokens, head_dim, DType::kF32, 1), v(kBlockTokens, value_dim, DType::kF32, 2);
    AlignedBuffer from(layout.block_bytes);
    WriteTokens(layout, from.As<std::byte>(), 0, kBlockTokens, k.From(0), v.From(0));
    for (int tokens = 0; tokens <= kBlockTokens; ++tokens) {
      for (const int first_slot : {0, tokens}) {
        AlignedBuffer to(layout.block_bytes);
        std::memset(to.As<std::byte>(), 0xFF, layout.block_bytes);
        InitBlock(layout, to.As<std::byte>(), first_slot);
        CopyTokens(layout, from.As<std::byte>(), tokens, to.As<std::byte>());
        CheckBlock(layout, to.As<std::byte>(), k, v, tokens);
        if (HasFatalFailure()) return;
      }
    }
  }
}

float FloatOf(const std::byte* block, size_t offset) {
  float value;
  std::memcpy(&value, block + offset, sizeof(value));
  return value;
}

TEST(Int8Test, ScalesAndTies) {
  const BlockLayout layout({5, 4, KvDType::kInt8});
  AlignedBuffer memory(layout.block_bytes);
  std::byte* block = memory.As<std::byte>();
  const auto write = [&](int slot, std::vector<float> k, std::vector<float> v) {
    WriteTokens(layout, block, slot, 1, {reinterpret_cast<const std::byte*>(k.data()), 0, DType::kF32},
                {reinterpret_cast<const std::byte*>(v.data()), 0, DType::kF32});
  };
  // 127 makes the scale 1: ties go to even.
  write(0, {127, 0.5f, 1.5f, -2.5f, -127}, {-254, 1, 3, 5});
  EXPECT_EQ(FloatOf(block, layout.KScalesOffset()), 1.0f);
  EXPECT_EQ(FloatOf(block, layout.VScalesOffset()), 2.0f);
  const std::vector<float> k = {127, 0, 2, -2, -127}, v = {-254, 0, 4, 4};
  for (int d = 0; d < 5; ++d) EXPECT_EQ(KAt(layout, block, 0, d), k[d]);
  for (int c = 0; c < 4; ++c) EXPECT_EQ(VAt(layout, block, 0, c), v[c]);
  // Zeros, and what has no normal scale; the largest numbers keep theirs.
  write(1, {0, -0.0f, 0, 0, 0}, {1e-38f, -1e-40f, 0, 0});
  write(2, {3.4e38f, -3.4e38f, 0, 0, 1e38f}, {2e-36f, 1e-36f, 0, 0});
  for (int d = 0; d < 5; ++d) EXPECT_EQ(KAt(layout, block, 1, d), 0.0f);
  for (int c = 0; c < 4; ++c) EXPECT_EQ(VAt(layout, block, 1, c), 0.0f);
  EXPECT_EQ(FloatOf(block, layout.VScalesOffset() + sizeof(float)), 0.0f);
  EXPECT_NEAR(KAt(layout, block, 2, 0), 3.4e38f, 1e32f);
  EXPECT_NEAR(KAt(layout, block, 2, 1), -3.4e38f, 1e32f);
  EXPECT_NEAR(KAt(layout, block, 2, 4), 1e38f, 1.4e36f);
  EXPECT_NEAR(VAt(layout, block, 2, 0), 2e-36f, 1e-42f);
  EXPECT_NEAR(VAt(layout, block, 2, 1), 1e-36f, 8e-39f);
}

INSTANTIATE_TEST_SUITE_P(Kv, AppendTest, AllKvDTypes(), KvParamName);

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint16_t ToBf16(float value) {
  uint16_t bits;
  RoundRowToBf16(&value, 1, &bits);
  return bits;
}

// Scenario K29.
TEST(Bf16Test, RoundsToNearestEven) {
  EXPECT_EQ(ToBf16(0.2691408770292272f), 0x3E8A);  // 0.26953125; truncation gives 0.267578125
  EXPECT_EQ(Bf16ToFloat(ToBf16(1.00390625f)), 1.0f);
  EXPECT_EQ(Bf16ToFloat(ToBf16(1.01171875f)), 1.015625f);
  EXPECT_EQ(Bf16ToFloat(ToBf16(0.1f)), 0.10009765625f);
  EXPECT_EQ(Bf16ToFloat(ToBf16(3.4e38f)), kInf);
  EXPECT_EQ(Bf16ToFloat(ToBf16(-3.4e38f)), -kInf);
  EXPECT_EQ(Bf16ToFloat(ToBf16(kInf)), kInf);
}

TEST(Bf16Test, NaNStaysNaN) {
  for (const uint32_t bits : {0x7F800001u, 0xFF800001u, 0x7FFFFFFFu, 0xFFFFFFFFu, 0x7FC00000u, 0x7F80FFFFu}) {
    EXPECT_TRUE(std::isnan(Bf16ToFloat(ToBf16(FromBits(bits))))) << std::hex << bits;
  }
}

TEST(Bf16Test, DenormalsAndZeros) {
  EXPECT_EQ(ToBf16(-0.0f), 0x8000);
  EXPECT_EQ(ToBf16(FromBits(0x00008000)), 0x0000);  // half an ulp, to even
  EXPECT_EQ(ToBf16(FromBits(0x00018000)), 0x0002);
  EXPECT_EQ(ToBf16(FromBits(0x00010000)), 0x0001);
}

TEST(Bf16Test, SameInEveryPlaceOfARow) {
  std::vector<float> row(70);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (float& x : row) x = normal(random);
  std::vector<uint16_t> rounded(row.size());
  RoundRowToBf16(row.data(), static_cast<int>(row.size()), rounded.data());
  for (size_t i = 0; i < row.size(); ++i) EXPECT_EQ(rounded[i], ToBf16(row[i]));
}

TEST(FindNonFiniteTest, FindsTheFirstWhereverItIs) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (const int count : {1, 7, 16, 33, 4095, 4096, 4097, 9000}) {
      std::vector<std::byte> bytes(1 + count * DTypeBytes(dtype));
      std::vector<float> values(count, 65504.0f);  // the largest finite f16
      const auto find = [&] {
        NarrowRow(values.data(), count, dtype, bytes.data() + 1);
        return FindNonFinite(bytes.data() + 1, dtype, count);
      };
      EXPECT_EQ(find(), -1);
      for (const int place : {0, count / 2, count - 1}) {
        for (const float bad : {kInf, -kInf, kNaN}) {
          values[place] = bad;
          values[count - 1] = bad;
          EXPECT_EQ(find(), place) << count;
          values[place] = values[count - 1] = 1.0f;
        }
      }
    }
    EXPECT_EQ(FindNonFinite(nullptr, dtype, 0), -1);
  }
}

}  // namespace
}  // namespace attnd::testing

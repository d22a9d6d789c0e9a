// head_dim and value_dim around the widths of vectors, tiles and panels, equal and unequal.
#include <gtest/gtest.h>

#include "tests/unit/kernels/harness.h"

namespace attnd::testing {
namespace {

constexpr int kDims[] = {1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 80, 96, 127, 128, 129, 191, 255, 256};

class ShapesTest : public ::testing::TestWithParam<KvDType> {};

void Check(KvDType dtype, int head_dim, int value_dim) {
  Problem problem;
  problem.shape = {head_dim, value_dim, dtype};
  problem.heads = {3, 1};
  // Few rows, many rows, and more than one run.
  ExpectRight(problem.Lengths(1, 66).Fill(head_dim));
  ExpectRight(problem.Lengths(7, 70).Fill(value_dim));
  ExpectRight(problem.Lengths(11, kRunTokens + 3).Fill(3));
}

TEST_P(ShapesTest, EqualDims) {
  for (const int dim : kDims) {
    Check(GetParam(), dim, dim);
    if (HasFatalFailure()) return;
  }
}

TEST_P(ShapesTest, UnequalDims) {
  constexpr int kCount = std::size(kDims);
  for (int i = 0; i < kCount; ++i) {
    Check(GetParam(), kDims[i], kDims[kCount - 1 - i]);
    Check(GetParam(), kDims[i], kDims[(i + 7) % kCount]);
    if (HasFatalFailure()) return;
  }
}

TEST(BlockLayoutTest, PanelsCoverV) {
  for (const KvDType dtype : {KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8}) {
    for (int dim = 1; dim <= kMaxHeadDim; ++dim) {
      const BlockLayout layout({dim, dim, dtype});
      const size_t element = dtype == KvDType::kF32 ? 4 : dtype == KvDType::kInt8 ? 1 : 2;
      const size_t scales = dtype == KvDType::kInt8 ? kBlockTokens * sizeof(float) : 0;
      int columns = 0;
      for (int p = 0; p < layout.num_panels; ++p) {
        EXPECT_EQ(layout.PanelOffset(p), layout.k_bytes + scales + columns * kBlockTokens * element);
        columns += layout.PanelWidth(p);
      }
      EXPECT_EQ(columns, dim);
      EXPECT_GE(layout.k_bytes, dim * kBlockTokens * element + scales);
      EXPECT_GE(layout.v_bytes, dim * kBlockTokens * element + scales);
      EXPECT_EQ(layout.k_bytes % 64, 0u);
      EXPECT_EQ(layout.v_bytes % 64, 0u);
      EXPECT_EQ(layout.block_bytes, layout.k_bytes + layout.v_bytes);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kv, ShapesTest, AllKvDTypes(), KvParamName);

}  // namespace
}  // namespace attnd::testing

// Attention against the float64 reference: lengths, rows of a tile, group sizes, options, extreme and broken scores.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/unit/kernels/harness.h"

namespace attnd::testing {
namespace {

class AttentionTest : public ::testing::TestWithParam<KvDType> {
 protected:
  Problem Make(int head_dim, int value_dim, HeadCounts heads) const {
    Problem problem;
    problem.shape = {head_dim, value_dim, GetParam()};
    problem.heads = heads;
    return problem;
  }
};

TEST_P(AttentionTest, EveryLengthTo200) {
  for (int64_t keys = 1; keys <= 200; ++keys) {
    // A decode of 4 rows, and more rows than the streaming kernel serves.
    ExpectRight(Make(24, 20, {4, 1}).Lengths(1, keys).Fill(keys));
    ExpectRight(Make(24, 20, {4, 1}).Lengths(std::min<int64_t>(5, keys), keys).Fill(keys));
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionTest, LengthsAroundEveryBlockAndRunEdge) {
  for (int64_t edge = 256; edge <= 2 * kRunTokens + 128; edge += kBlockTokens) {
    for (int64_t keys = edge - 1; keys <= edge + 1; ++keys) {
      ExpectRight(Make(16, 16, {2, 1}).Lengths(1, keys).Fill(keys));
      ExpectRight(Make(16, 16, {2, 1}).Lengths(17, keys).Fill(keys));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(AttentionTest, RowsFrom1To64) {
  for (int64_t rows = 1; rows <= 64; ++rows) {
    ExpectRight(Make(32, 32, {1, 1}).Lengths(rows, 130).Fill(rows));
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionTest, ManyTiles) {
  ExpectRight(Make(16, 16, {6, 2}).Lengths(150, 600).Fill(1));
  ExpectRight(Make(64, 64, {4, 2}).Lengths(257, 257).Fill(2));
}

TEST_P(AttentionTest, GroupSizes) {
  for (const int group : {1, 2, 3, 4, 7, 8, 16, 71, 130, 300}) {
    for (const int64_t queries : {1, 2, 5}) {
      ExpectRight(Make(16, 24, {2 * group, 2}).Lengths(queries, 70).Fill(group));
    }
    ExpectRight(Make(16, 24, {group, 1}).Lengths(1, 600).Fill(group));
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttentionTest, ZeroKeysAndZeroQueries) {
  Problem none = Make(8, 8, {2, 1}).Lengths(0, 5).Fill(1);
  EXPECT_TRUE(Attend(none).out.empty());
  Problem empty = Make(8, 8, {2, 1});
  empty.num_queries = 2;
  empty.num_keys = 0;
  empty.softmax.causal = false;
  ExpectRight(empty.Fill(1));
}

TEST_P(AttentionTest, TypesOfQueriesAndOutputs) {
  for (const DType q : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (const DType out : {DType::kF32, DType::kBf16, DType::kF16}) {
      Problem problem = Make(33, 65, {4, 2});
      problem.q_dtype = q;
      problem.out_dtype = out;
      problem.Lengths(3, 70).Fill(5);
      ExpectRight(problem);
      How how;
      how.misaligned = true;
      ExpectRight(problem, how);
      ExpectSameBits(Attend(problem), Attend(problem, how), "misaligned q and out");
    }
  }
}

// Scores of +-6e4 that f32 holds exactly: the answer must be as exact as with small ones.
TEST_P(AttentionTest, ExtremeScores) {
  for (const float top : {6e4f, -6e4f}) {
    Problem problem = Make(2, 16, {2, 1}).Lengths(3, 140).Fill(3);
    problem.softmax.softmax_scale = 1.0f;
    problem.softmax.causal = false;
    for (size_t i = 0; i < problem.q.size(); i += 2) {
      problem.q[i] = 256.0f;
      problem.q[i + 1] = 1.0f;
    }
    for (size_t j = 0; j < problem.k.size(); j += 2) {
      problem.k[j] = std::trunc(top / 256.0f);
      problem.k[j + 1] = static_cast<float>(j % 11) * 0.25f;
    }
    ExpectRight(problem);
  }
}

// A scale that is no power of two: the score is rounded once, together with the subtraction of the maximum.
TEST_P(AttentionTest, LargeScoresWithScale) {
  Problem problem = Make(1, 16, {1, 1}).Lengths(1, 600).Fill(3);
  problem.softmax.softmax_scale = 0.1f;
  problem.q[0] = 512.0f;
  for (size_t j = 0; j < problem.k.size(); ++j) problem.k[j] = 1024.0f - static_cast<float>(j % 8) / 512.0f;
  if (GetParam() == KvDType::kBf16) {
    for (float& k : problem.k) k = 1024.0f;
  }
  ExpectRight(problem);
}

TEST_P(AttentionTest, HugeScoresStayFinite) {
  for (const auto& [q, k] : {std::pair{1.0f, 3e38f}, {5e33f, 6e4f}}) {
    if (GetParam() == KvDType::kF16 && k > 65504.0f) continue;  // would be stored as infinity
    for (const float scale : {1.0f, 0.3f}) {
      Problem problem = Make(1, 16, {1, 1}).Lengths(1, 3).Fill(3);
      problem.softmax.softmax_scale = scale;
      problem.q = {q};
      problem.k = {k, k, -k};
      ExpectRight(problem);
    }
  }
}

// Scores as spread as they come: a few tokens have nearly all the weight.
TEST_P(AttentionTest, ScoresOfStandardDeviation10) {
  for (const int64_t queries : {1, 20}) {
    Problem problem = Make(64, 64, {4, 1}).Lengths(queries, 2000);
    problem.softmax.softmax_scale = 1.25f;  // q . k has 8
    ExpectRight(problem.Fill(3));
  }
}

// One token outweighs each of the others so far that their weights are lost beside its own in 16 bits (as integers,
// below half a unit): together they must not matter more than the contract allows.
TEST_P(AttentionTest, OneDominatingTokenAndManySmallOnes) {
  for (const float distance : {3.0f, 9.0f, 11.1f, 14.0f}) {
    Problem problem = Make(2, 16, {1, 1}).Lengths(1, kRunTokens).Fill(3);
    problem.softmax.softmax_scale = 1.0f;
    problem.q = {1.0f, 0.0f};
    for (size_t i = 0; i < problem.k.size(); ++i) problem.k[i] = 0.0f;
    problem.k[2 * 100] = distance;
    for (float& v : problem.v) v = std::fabs(v);
    ExpectRight(problem);
  }
}

TEST_P(AttentionTest, OverflowIsReportedWithItsRow) {
  for (const int64_t queries : {1, 30}) {
    Problem problem = Make(4, 16, {2, 1}).Lengths(queries, 100).Fill(3);
    const int64_t bad_row = queries - 1;
    const float large = GetParam() == KvDType::kF16 ? 6e4f : 1e20f;  // finite as stored
    float* q = &problem.q[(bad_row * 2 + 1) * 4];
    for (int d = 0; d < 4; ++d) q[d] = 3e38f;
    for (int d = 0; d < 4; ++d) problem.k[4 * 7 + d] = d % 2 == 0 ? large : -large;  // inf - inf on the way
    const Answer answer = Attend(problem);
    EXPECT_EQ(answer.result.overflow_row, bad_row);
    EXPECT_EQ(answer.result.overflow_head, 1);
  }
}

// All scores below what f32 holds: not a row with nothing to attend.
TEST_P(AttentionTest, OverflowDownwardsIsReported) {
  for (const int64_t queries : {1, 40}) {
    Problem problem = Make(4, 16, {1, 1}).Lengths(queries, 100).Fill(3);
    problem.softmax.softmax_scale = 1e36f;
    for (float& q : problem.q) q = 100.0f;
    for (float& k : problem.k) k = -100.0f;
    EXPECT_EQ(Attend(problem).result.overflow_row, 0);
    problem.softmax.softcap = 10.0f;  // brings them back
    EXPECT_EQ(Attend(problem).result.overflow_row, -1);
  }
}

// One token outweighs each of the others, but its V is narrow and all others' together count for as much. Weights of
// INT8 are just beside half a unit then: rounded apart, all would err in one direction.
TEST_P(AttentionTest, OneLargeWeightBesideManySmallOnes) {
  for (const float top : {9.0f, 10.0f, 11.08f}) {
    Problem problem = Make(4, 64, {1, 1}).Lengths(1, 512).Fill(3);
    problem.softmax.softmax_scale = 1.0f;
    problem.q = {1, 0, 0, 0};
    std::fill(problem.k.begin(), problem.k.end(), 0.0f);
    problem.k[0] = top;
    std::fill(problem.v.begin(), problem.v.end(), 1.0f);
    for (int c = 1; c < 64; ++c) problem.v[c] = 0;
    // F32 adds 511 times a number of which a part is lost beside 1: see README.md.
    ExpectRight(problem, Attend(problem), GetParam() == KvDType::kInt8 ? 10.0 : 3.0);
  }
}

TEST_P(AttentionTest, OverflowBehindTheMaskIsNoMatter) {
  for (const float bad : {kNaN, kInf, 3e38f}) {
    Problem problem = Make(4, 16, {2, 1}).Lengths(3, 100).Fill(3);
    problem.softmax.window = 20;
    for (int d = 0; d < 4; ++d) problem.k[4 * 7 + d] = bad;
    const Answer answer = Attend(problem);
    EXPECT_EQ(answer.result.overflow_row, -1);
    ExpectRight(problem, answer);
  }
}

TEST_P(AttentionTest, OverflowOfTheOutputIsReported) {
  Problem problem = Make(4, 16, {1, 1}).Lengths(1, 100).Fill(3);
  for (float& q : problem.q) q = 0;
  for (float& v : problem.v) v = 3e38f;  // the sum of 100 of them is beyond f32, though their mean is not
  EXPECT_EQ(Attend(problem).result.overflow_row, 0);
}

// Most of f16's numbers below 6e-5 are subnormal: they must not be flushed to zero.
TEST_P(AttentionTest, SubnormalF16) {
  for (const int64_t queries : {1, 20}) {
    Problem problem = Make(16, 16, {1, 1}).Lengths(queries, 70).Fill(3);
    for (float& q : problem.q) q *= 1e5f;
    for (float& k : problem.k) k *= 1e-5f;
    for (float& v : problem.v) v *= 1e-5f;
    ExpectRight(problem);
  }
}

TEST_P(AttentionTest, EmptyRowsAreZeros) {
  Problem problem = Make(8, 16, {2, 1});
  problem.num_queries = 6;
  problem.num_keys = 3;
  problem.first_position = -2;  // rows 0 and 1 see nothing
  problem.Fill(1);
  const Answer answer = Attend(problem);
  ExpectRight(problem, answer);
  for (int i = 0; i < 2 * 2 * 16; ++i) EXPECT_EQ(answer.out[i], 0.0f);
  EXPECT_EQ(answer.lse[3], -kInf);
  EXPECT_EQ(FindEmptyRow(MakeWork(problem, Blocks(problem), nullptr, nullptr, nullptr)), 0);
  const std::vector<float> sinks = {0.5f, -3.0f};
  problem.softmax.sinks = sinks.data();
  const Answer with_sink = Attend(problem);
  EXPECT_EQ(with_sink.lse[0], 0.5f);
  EXPECT_EQ(with_sink.lse[1], -3.0f);
  EXPECT_EQ(with_sink.out[0], 0.0f);
  ExpectRight(problem, with_sink);
}

TEST_P(AttentionTest, KvBytesReadCountsVisibleBlocks) {
  Problem problem = Make(16, 16, {4, 2}).Lengths(1, 1000).Fill(1);
  problem.softmax.window = 65;  // keys 935..999: blocks 14 and 15
  const Blocks blocks(problem);
  std::vector<float> out(4 * 16);
  AttentionBatch batch(2);
  batch.Add(MakeWork(problem, blocks, reinterpret_cast<const std::byte*>(problem.q.data()),
                     reinterpret_cast<std::byte*>(out.data()), nullptr));
  RunTasks(&batch, {});
  EXPECT_EQ(batch.kv_bytes_read(), static_cast<int64_t>(2 * 2 * BlockLayout(problem.shape).block_bytes));
}

INSTANTIATE_TEST_SUITE_P(Kv, AttentionTest, AllKvDTypes(), KvParamName);

}  // namespace
}  // namespace attnd::testing

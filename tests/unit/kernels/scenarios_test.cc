// Bug reports against systems like this one, as far as they concern the kernels: each with its own numbers, and its
// kind.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/unit/kernels/harness.h"

namespace attnd::testing {
namespace {

constexpr float kLn3 = 1.0986123f, kLn64 = 4.1588831f;

// One head, the numbers given; scale 1 unless said otherwise.
Problem Given(int dim, std::vector<float> q, std::vector<float> k, std::vector<float> v) {
  Problem problem;
  problem.num_queries = static_cast<int64_t>(q.size()) / dim;
  problem.num_keys = static_cast<int64_t>(k.size()) / dim;
  problem.first_position = problem.num_keys - problem.num_queries;
  problem.shape = {dim, static_cast<int>(v.size() / problem.num_keys), KvDType::kF32};
  problem.q = std::move(q);
  problem.k = std::move(k);
  problem.v = std::move(v);
  return problem;
}

Problem AllKeys(Problem problem) {
  problem.softmax.causal = false;
  return problem;
}

std::vector<float> Out(const Problem& problem, const How& how = {}) { return Attend(problem, how).out; }

void ExpectOut(const Problem& problem, const std::vector<float>& expected, double tolerance = 1e-5) {
  const std::vector<float> out = Out(problem);
  ASSERT_EQ(out.size(), expected.size());
  for (size_t i = 0; i < out.size(); ++i) {
    EXPECT_NEAR(out[i], expected[i], tolerance * std::max(1.0f, std::fabs(expected[i]))) << "element " << i;
  }
}

TEST(ScenarioTest, K01CausalAlignmentWithACache) {
  Problem problem = Given(2, {1, 0, 1, 1, 0, 2, 1, -1}, {1, 0, 0, 1, 1, 1, 2, 0}, {1, 0, 0, 1, 2, 2, 4, -4});
  problem.softmax.softmax_scale = 1.0f / std::sqrt(2.0f);
  const std::vector<float> right = {1, 0, 0.5f, 0.5f, 1.0f, 1.3374248f, 2.6827289f, -1.8285485f};
  ExpectOut(problem, right);
  How how;
  how.chunks = {1};
  const std::vector<float> steps = Out(problem, how);
  how.chunks = {2, 2};
  EXPECT_EQ(steps, Out(problem, how));
  EXPECT_EQ(steps, Out(problem));
}

TEST(ScenarioTest, K02MoreQueriesThanKeys) {
  for (const int queries : {2, 3, 40}) {
    const Problem problem = Given(1, std::vector<float>(queries, 1.0f), {1}, {5});
    std::vector<float> right(queries, 0.0f);
    right.back() = 5;
    EXPECT_EQ(Out(problem), right);
  }
}

TEST(ScenarioTest, K03FullyMaskedRow) {
  const std::vector<uint8_t> none = {0}, second = {0b111000};
  Problem problem = AllKeys(Given(1, {1}, {0, 0, 0}, {2, 4, 9}));
  problem.mask = {none.data(), 3, 0, 0};
  EXPECT_EQ(Out(problem), std::vector<float>{0});
  EXPECT_EQ(FindEmptyRow(MakeWork(problem, Blocks(problem), nullptr, nullptr, nullptr)), 0);
  problem = AllKeys(Given(1, {1, 1}, {0, 0, 0}, {2, 4, 9}));
  problem.mask = {second.data(), 3, 0, 0};
  EXPECT_EQ(Out(problem), (std::vector<float>{0, 5}));
}

TEST(ScenarioTest, K05LargeScores) {
  ExpectOut(Given(1, {1}, {1000, 1001, 1002}, {1, 2, 3}), {2.5752104f});
  ExpectOut(Given(1, {1}, {88, 89}, {1, 2}), {1.7310586f});
  ExpectOut(Given(1, {1}, {3e38f, 3e38f}, {1, 2}), {1.5f});
  ExpectOut(Given(1, {1}, {-1000, -1001, -1002}, {1, 2, 3}), {1.4247896f});
  ExpectOut(Given(1, {1}, {-3e38f, -3e38f}, {1, 2}), {1.5f});
}

TEST(ScenarioTest, K07LowestFiniteScore) {
  // Our masks are bits; a key of the lowest scores is a key like another.
  ExpectOut(Given(1, {1}, {-3.4028235e38f, 0}, {7, 3}), {3});
  ExpectOut(Given(1, {1}, {-3.4028235e38f, -3.4028235e38f}, {7, 3}), {5});
}

TEST(ScenarioTest, K09UnwrittenOrRecycledMemory) {
  // The harness fills all memory with NaN before a block is initialised; K = 0, so outputs are means.
  for (const KvDType dtype : {KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8}) {
    Problem problem = Given(1, {1, 1, 1}, {0, 0, 0}, {1, 2, 3});
    problem.shape.dtype = dtype;
    EXPECT_EQ(Out(problem), (std::vector<float>{1.0f, 1.5f, 2.0f}));
    for (int keys = 1; keys <= 130; ++keys) {
      problem = Given(1, {1}, std::vector<float>(keys, 0.0f), std::vector<float>(keys, 3.0f));
      problem.shape.dtype = dtype;
      EXPECT_EQ(Out(problem), std::vector<float>{3.0f}) << keys;
    }
  }
}

TEST(ScenarioTest, K11HeadsAreGrouped) {
  const auto mapped = [](int q_heads, int kv_heads, std::vector<float> v) {
    Problem problem = Given(1, std::vector<float>(q_heads, 1.0f), std::vector<float>(kv_heads, 1.0f), std::move(v));
    problem.heads = {q_heads, kv_heads};
    problem.num_queries = problem.num_keys = 1;
    problem.first_position = 0;
    problem.shape.value_dim = 1;
    return Out(problem);
  };
  EXPECT_EQ(mapped(4, 2, {10, 20}), (std::vector<float>{10, 10, 20, 20}));
  EXPECT_EQ(mapped(6, 3, {10, 20, 30}), (std::vector<float>{10, 10, 20, 20, 30, 30}));
  EXPECT_EQ(mapped(3, 1, {7}), (std::vector<float>{7, 7, 7}));
  EXPECT_EQ(mapped(3, 3, {1, 2, 3}), (std::vector<float>{1, 2, 3}));
}

TEST(ScenarioTest, K13WindowCountsTheCurrentToken) {
  Problem problem = Given(1, std::vector<float>(6, 1.0f), std::vector<float>(6, 0.0f), {0, 1, 2, 3, 4, 5});
  problem.softmax.window = 3;
  ExpectOut(problem, {0, 0.5f, 1, 2, 3, 4});
  How how;
  how.chunks = {1};
  EXPECT_EQ(Out(problem), Out(problem, how));
  problem.softmax.window = 1;
  ExpectOut(problem, {0, 1, 2, 3, 4, 5});
}

TEST(ScenarioTest, K17Scales) {
  const float k1 = kLn3 / 2;
  Problem problem = Given(4, {1, 1, 1, 1}, {0, 0, 0, 0, k1, k1, k1, k1}, {0, 4});
  problem.softmax.softmax_scale = 0.5f;
  ExpectOut(problem, {3.0f});
  problem.softmax.softmax_scale = 0.0f;
  ExpectOut(problem, {2.0f});
  problem.softmax.softmax_scale = 1.0f;
  ExpectOut(problem, {3.6f});
}

TEST(ScenarioTest, K18SoftcapBeforeTheMask) {
  const std::vector<uint8_t> first_only = {0b01};
  Problem problem = AllKeys(Given(1, {1}, {0, 5}, {0, 100}));
  problem.softmax.softcap = 1.0f;
  problem.mask = {first_only.data(), 2, 0, 0};
  EXPECT_EQ(Out(problem), std::vector<float>{0.0f});
  problem = Given(1, {1}, {100, 50}, {1, 2});
  problem.softmax.softcap = 50.0f;
  ExpectOut(problem, {1.0000402f}, 1e-6);
}

TEST(ScenarioTest, K21TailsOfDimsAndKeys) {
  for (int dim = 1; dim <= kMaxHeadDim; dim += dim < 100 ? 1 : 31) {
    std::vector<float> q(dim, 0.0f), k(2 * dim, 0.0f);
    q[dim - 1] = 1;
    k[dim - 1] = kLn3;
    ExpectOut(Given(dim, q, k, {0, 4}), {1.0f});
  }
  std::vector<float> v(65, 0.0f);
  v[64] = 65;
  ExpectOut(Given(1, {1}, std::vector<float>(65, 0.0f), v), {1.0f});
}

TEST(ScenarioTest, K21RunningMaximum) {
  for (const int before : {64, 512, 576}) {
    std::vector<float> k(before + 1, 0.0f), v(before + 1, 1.0f);
    k[before] = kLn64 + std::log(before / 64.0f);
    v[before] = 3.0f;
    ExpectOut(Given(1, {1}, k, v), {2.0f});
    std::reverse(k.begin(), k.end());
    std::reverse(v.begin(), v.end());
    ExpectOut(Given(1, {1}, k, v), {2.0f});
  }
  std::vector<float> k(513, 0.0f), v(513, 0.0f);
  k[512] = 100;
  v[512] = 1;
  ExpectOut(Given(1, {1}, k, v), {1.0f});
}

TEST(ScenarioTest, K26MaskIsNotALength) {
  const std::vector<uint8_t> bits = {0b101};
  Problem problem = AllKeys(Given(1, {1}, {0, 0, 0}, {1, 10, 3}));
  problem.mask = {bits.data(), 3, 0, 0};
  ExpectOut(problem, {2.0f});
}

TEST(ScenarioTest, K27LeftPadding) {
  const std::vector<uint8_t> bits = {0b1100};
  Problem padded = AllKeys(Given(1, {1}, {0, 0, 0, 0}, {100, 100, 5, 7}));
  padded.mask = {bits.data(), 4, 0, 0};
  EXPECT_EQ(Out(padded), std::vector<float>{6.0f});
  EXPECT_EQ(Out(Given(1, {1}, {0, 0}, {5, 7})), std::vector<float>{6.0f});
}

TEST(ScenarioTest, K30AccumulationInF32) {
  for (const KvDType dtype : {KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8}) {
    for (const int keys : {512, 4096}) {
      for (const int queries : {1, 20}) {
        Problem problem = AllKeys(Given(1, std::vector<float>(queries, 1.0f), std::vector<float>(keys, 0.0f),
                                        std::vector<float>(keys, 1.0f)));
        problem.shape.dtype = dtype;
        EXPECT_EQ(Out(problem), std::vector<float>(queries, 1.0f));
      }
    }
  }
  Problem problem = Given(1, {1}, {0, kLn3}, {0, 4});
  problem.shape.dtype = KvDType::kBf16;  // ln 3 is stored as 1.1015625
  ExpectOut(problem, {3.0022110f}, RowTolerance(KvDType::kBf16));
}

// Every output is a mix of one constant: whatever the weights are, they add up to 1.
TEST(ScenarioTest, S19ConvexMixOfAConstant) {
  for (const KvDType dtype : {KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8}) {
    Problem problem;
    problem.shape = {64, 64, dtype};
    problem.heads = {4, 2};
    problem.Lengths(20, 700).Fill(1);
    for (float& v : problem.v) v = 63.0f;
    for (const float x : Out(problem)) ASSERT_NEAR(x, 63.0f, 63.0f * (dtype == KvDType::kF32 ? 1e-6 : 1e-3));
  }
}

// seed.json: a constant added to all scores of a row changes nothing.
TEST(ScenarioTest, ShiftInvariance) {
  ExpectOut(Given(1, {1}, {kLn3, 0}, {2, 8}), {3.5f});
  ExpectOut(Given(1, {1}, {101.09861228866811f, 100}, {2, 8}), {3.5f}, 2e-5);
}

}  // namespace
}  // namespace attnd::testing

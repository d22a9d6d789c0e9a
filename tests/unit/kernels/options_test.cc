// The options of the softmax, one by one and in random company: causal, window, softcap, scale, sinks, ALiBi, masks,
// log-sum-exp and weights.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "tests/unit/kernels/harness.h"

namespace attnd::testing {
namespace {

struct MaskBits {
  std::vector<uint8_t> bits;
  MaskBits(int64_t rows, int64_t columns, unsigned seed, double density) : bits((rows * columns + 7) / 8) {
    std::mt19937 random(seed);
    std::bernoulli_distribution allowed(density);
    for (int64_t i = 0; i < rows * columns; ++i) bits[i / 8] |= allowed(random) << (i % 8);
  }
};

class OptionsTest : public ::testing::TestWithParam<KvDType> {
 protected:
  Problem Make(int64_t queries, int64_t keys) const {
    Problem problem;
    problem.shape = {20, 16, GetParam()};
    problem.heads = {4, 2};
    return problem.Lengths(queries, keys).Fill(static_cast<unsigned>(queries * 1000 + keys));
  }
  How WithWeights() const {
    How how;
    how.weights = true;
    return how;
  }
};

TEST_P(OptionsTest, CausalAndNot) {
  for (const bool causal : {false, true}) {
    for (const int64_t queries : {1, 9, 70}) {
      Problem problem = Make(queries, 130);
      problem.softmax.causal = causal;
      ExpectRight(problem, WithWeights());
      problem.first_position = 0;  // more keys than positions
      ExpectRight(problem, WithWeights());
      problem.first_position = 500;  // all keys are past
      ExpectRight(problem, WithWeights());
    }
  }
}

TEST_P(OptionsTest, Windows) {
  for (const int64_t window : {1, 2, 63, 64, 65, 128, 511, 512, 513, 2000}) {
    for (const int64_t queries : {1, 40}) {
      for (const bool causal : {true, false}) {
        Problem problem = Make(queries, 1100);
        problem.softmax.window = window;
        problem.softmax.causal = causal;
        ExpectRight(problem);
      }
    }
  }
}

TEST_P(OptionsTest, Softcap) {
  for (const float cap : {0.5f, 1.0f, 30.0f, 50.0f}) {
    Problem problem = Make(5, 130);
    problem.softmax.softcap = cap;
    problem.softmax.softmax_scale = 3.0f;
    ExpectRight(problem, WithWeights());
  }
}

TEST_P(OptionsTest, Scales) {
  for (const float scale : {0.0f, -0.7f, 0.25f, 2.0f}) {
    Problem problem = Make(5, 600);
    problem.softmax.softmax_scale = scale;
    ExpectRight(problem, WithWeights());
  }
}

TEST_P(OptionsTest, Sinks) {
  const std::vector<float> sinks = {-5.0f, 0.0f, 3.0f, 60.0f};  // below, among and far above the scores
  for (const int64_t queries : {1, 30}) {
    Problem problem = Make(queries, 600);
    problem.softmax.sinks = sinks.data();
    ExpectRight(problem, WithWeights());
  }
}

TEST_P(OptionsTest, Alibi) {
  const std::vector<float> slopes = {0.5f, 0.25f, 0.0f, -0.01f};
  for (const int64_t queries : {1, 30}) {
    Problem problem = Make(queries, 600);
    problem.softmax.alibi_slopes = slopes.data();
    ExpectRight(problem, WithWeights());
    problem.softmax.softcap = 2.0f;
    ExpectRight(problem, WithWeights());
  }
}

TEST_P(OptionsTest, MasksOverAllKeys) {
  for (const int64_t keys : {1, 7, 63, 64, 65, 200, 700}) {
    Problem problem = Make(5, std::max<int64_t>(keys, 5));
    const MaskBits mask(problem.num_queries, problem.num_keys, 11, 0.5);
    problem.mask = {mask.bits.data(), problem.num_keys, 0, 0};
    for (const bool causal : {true, false}) {
      problem.softmax.causal = causal;
      ExpectRight(problem, WithWeights());
    }
  }
}

// Tree speculation: a mask among the new tokens only, at any place in a block.
TEST_P(OptionsTest, MasksOverTheLastTokens) {
  for (const int64_t keys : {20, 64, 70, 129, 513, 530}) {
    Problem problem = Make(9, keys);
    const MaskBits mask(9, 9, static_cast<unsigned>(keys), 0.6);
    problem.mask = {mask.bits.data(), 9, keys - 9, 0};
    ExpectRight(problem, WithWeights());
  }
}

TEST_P(OptionsTest, MaskedKeysHaveNoInfluence) {
  Problem problem = Make(4, 300);
  problem.softmax.causal = false;
  std::vector<uint8_t> bits((4 * 300 + 7) / 8, 0xFF);
  for (int row = 0; row < 4; ++row) {
    for (const int key : {0, 77, 299}) bits[(row * 300 + key) / 8] &= ~(1 << ((row * 300 + key) % 8));
  }
  problem.mask = {bits.data(), 300, 0, 0};
  const Answer clean = Attend(problem);
  for (const int key : {0, 77, 299}) {
    for (int i = 0; i < 40; ++i) problem.k[key * 40 + i] = i % 2 == 0 ? kNaN : kInf;
  }
  const Answer dirty = Attend(problem);
  EXPECT_EQ(dirty.result.overflow_row, -1);
  ExpectSameBits(clean, dirty, "NaN and infinity in masked keys");
}

TEST_P(OptionsTest, RandomCompany) {
  std::mt19937 random(99);
  const auto pick = [&random](int n) { return static_cast<int>(random() % n); };
  const std::vector<float> slopes = {0.5f, 0.1f, 0.02f, 0.0f}, sinks = {0.0f, -2.0f, 1.5f, 3.0f};
  for (int i = 0; i < 80; ++i) {
    const int64_t keys = 1 + pick(1200);
    Problem problem = Make(1 + pick(std::min<int>(50, keys)), keys);
    problem.softmax.causal = pick(3) != 0;
    if (pick(2) == 0) problem.softmax.window = 1 + pick(700);
    if (pick(3) == 0) problem.softmax.softcap = 1.0f + pick(30);
    if (pick(3) == 0) problem.softmax.alibi_slopes = slopes.data();
    if (pick(3) == 0) problem.softmax.sinks = sinks.data();
    const MaskBits mask(problem.num_queries, keys, i, 0.8);
    if (pick(3) == 0) problem.mask = {mask.bits.data(), keys, 0, 0};
    How how;
    how.weights = pick(2) == 0;
    how.threads = 1 + pick(4);
    how.task_order = pick(5);
    ExpectRight(problem, how);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Kv, OptionsTest, AllKvDTypes(), KvParamName);

}  // namespace
}  // namespace attnd::testing

// The two checks, against attention by the plain formula and against faults.
#include "client/attnload/check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/strings/match.h"

namespace attnd::attnload {
namespace {

PlanOptions Options(double check_rate) {
  PlanOptions options;
  options.config = {.num_layers = 2, .num_q_heads = 6, .num_kv_heads = 2, .head_dim = 8, .value_dim = 5};
  options.prefill_tokens = 9;
  options.prefill_chunk = 9;
  options.decode_tokens = 4;
  options.check_rate = check_rate;
  return options;
}

client::Tensor ToTensor(const std::vector<float>& values) {
  client::Tensor tensor;
  tensor.data.resize(4 * values.size());
  std::memcpy(tensor.data.data(), values.data(), tensor.data.size());
  return tensor;
}

// All heads of the step's tokens, as attnd answers them.
std::vector<float> Attend(const Plan& plan, const client::SessionConfig& c, const TensorPool& pool,
                          const PlannedStep& step) {
  const int dim = c.value_dim_or_default(), group = c.num_q_heads / c.num_kv_heads;
  const int64_t keys = step.position + step.tokens;
  const auto rows = [&](TensorKind kind, int64_t position, int64_t tokens, int64_t row) {
    return pool.Rows(plan.session(), step.layer, kind, position, tokens, row);
  };
  const auto q = rows(TensorKind::kQ, step.position, step.tokens, int64_t{c.num_q_heads} * c.head_dim);
  const auto k = rows(TensorKind::kK, 0, keys, int64_t{c.num_kv_heads} * c.head_dim);
  const auto v = rows(TensorKind::kV, 0, keys, int64_t{c.num_kv_heads} * dim);
  std::vector<float> out;
  for (int64_t t = 0; t < step.tokens; ++t) {
    for (int h = 0; h < c.num_q_heads; ++h) {
      std::vector<double> sum(static_cast<size_t>(dim), 0);
      double total = 0;
      for (int64_t j = 0; j <= step.position + t; ++j) {
        double score = 0;
        for (int d = 0; d < c.head_dim; ++d) {
          score += double{q[(t * c.num_q_heads + h) * c.head_dim + d]} *
                   k[(j * c.num_kv_heads + h / group) * c.head_dim + d];
        }
        const double weight = std::exp(score / std::sqrt(static_cast<double>(c.head_dim)));
        total += weight;
        for (int d = 0; d < dim; ++d) sum[d] += weight * v[(j * c.num_kv_heads + h / group) * dim + d];
      }
      for (const double s : sum) out.push_back(static_cast<float>(s / total));
    }
  }
  return out;
}

struct ReferenceTest : ::testing::Test {
  ReferenceTest() : options(Options(1)), plan(options, 3), pool(1, 1000) {}
  CheckOutcome Check(const PlannedStep& step, const std::vector<float>& out) {
    return CheckReference(plan, options.config, pool, step, /*kv_head=*/1, ToTensor(out));
  }
  PlanOptions options;
  Plan plan;
  TensorPool pool;
};

TEST_F(ReferenceTest, RightAnswersPass) {
  for (int64_t i = 0; i < plan.steps(); ++i) {
    const PlannedStep step = plan.StepAt(i);
    const CheckOutcome outcome = Check(step, Attend(plan, options.config, pool, step));
    EXPECT_EQ(outcome.mismatch, "");
    EXPECT_EQ(outcome.rows, step.prefill ? 12 : 3);  // the last 4 tokens, 3 query heads of the kv head
    EXPECT_LT(outcome.max_error, 1e-6);
  }
}

TEST_F(ReferenceTest, ASmallErrorIsFoundAndNamed) {
  const PlannedStep step = plan.StepAt(plan.steps() - 1);  // position 12 of layer 1
  std::vector<float> out = Attend(plan, options.config, pool, step);
  out[4 * 5 + 2] *= 1.001f;  // head 4, element 2
  const CheckOutcome outcome = Check(step, out);
  for (const char* part : {"layer 1", "position 12", "head 4", "element 2", "expected", "got"}) {
    EXPECT_TRUE(absl::StrContains(outcome.mismatch, part)) << outcome.mismatch;
  }
}

TEST_F(ReferenceTest, AnotherSessionsAnswerIsWrong) {
  const PlannedStep step = plan.StepAt(plan.steps() - 1);
  EXPECT_NE(Check(step, Attend(Plan(options, 4), options.config, pool, step)).mismatch, "");
}

TEST_F(ReferenceTest, NothingButNumbersPass) {
  const PlannedStep step = plan.StepAt(plan.steps() - 1);
  std::vector<float> out = Attend(plan, options.config, pool, step);
  out[3 * 5] = std::numeric_limits<float>::quiet_NaN();
  const CheckOutcome outcome = Check(step, out);
  EXPECT_TRUE(absl::StrContains(outcome.mismatch, "element 0")) << outcome.mismatch;
  EXPECT_TRUE(std::isinf(outcome.max_error));
}

struct ConstantTest : ::testing::Test {
  ConstantTest() : options(Options(0)), plan(options, 3) {}
  std::vector<float> Right(const PlannedStep& step) {
    std::vector<float> out;
    for (int64_t t = 0; t < step.tokens; ++t) {
      for (int h = 0; h < 6; ++h) out.insert(out.end(), 5, plan.Constant(step.layer, h / 3));
    }
    return out;
  }
  CheckOutcome Check(const PlannedStep& step, const std::vector<float>& out) {
    return CheckConstant(plan, options.config, step, ToTensor(out));
  }
  PlanOptions options;
  Plan plan;
};

TEST_F(ConstantTest, TheConstantsOfItsHeadsPass) {
  const PlannedStep step = plan.StepAt(1);  // the prefill of layer 1
  const CheckOutcome outcome = Check(step, Right(step));
  EXPECT_EQ(outcome.mismatch, "");
  EXPECT_EQ(outcome.rows, 54);
}

TEST_F(ConstantTest, AnyWrongElementOfADecodeIsFound) {
  const PlannedStep step = plan.StepAt(plan.steps() - 1);
  for (size_t i = 0; i < 30; ++i) {
    std::vector<float> out = Right(step);
    out[i] += 0.01f;
    EXPECT_NE(Check(step, out).mismatch, "") << i;
  }
}

TEST_F(ConstantTest, AnotherLayersAnswerIsWrong) {
  PlannedStep step = plan.StepAt(plan.steps() - 1);
  const std::vector<float> of_layer_1 = Right(step);
  step.layer = 0;
  EXPECT_NE(Check(step, of_layer_1).mismatch, "");
}

TEST_F(ConstantTest, AnAnswerOfAnotherSizeIsWrong) {
  const PlannedStep step = plan.StepAt(plan.steps() - 1);
  std::vector<float> out = Right(step);
  out.pop_back();
  EXPECT_TRUE(absl::StrContains(Check(step, out).mismatch, "expected 30 elements"));
}

TEST_F(ConstantTest, VIsTheConstantInEveryRow) {
  std::vector<float> v;
  FillConstant(plan, options.config, 1, 3, &v);
  ASSERT_EQ(v.size(), 30u);
  for (size_t i = 0; i < v.size(); ++i) EXPECT_EQ(v[i], plan.Constant(1, static_cast<int>(i % 10 / 5)));
}

TEST(TensorPoolTest, OverlappingRangesAgree) {
  const TensorPool pool(5, 4000);
  const auto all = pool.Rows(7, 1, TensorKind::kK, 0, 100, 40);
  for (int64_t position = 0; position < 100; ++position) {
    const auto one = pool.Rows(7, 1, TensorKind::kK, position, 1, 40);
    EXPECT_TRUE(std::equal(one.begin(), one.end(), all.begin() + position * 40)) << position;
  }
  const auto other = pool.Rows(8, 1, TensorKind::kK, 0, 1, 40);
  EXPECT_FALSE(std::equal(other.begin(), other.end(), all.begin()));
}

}  // namespace
}  // namespace attnd::attnload

// Arrivals and plans: functions of their arguments alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "client/attnload/arrivals.h"
#include "client/attnload/plan.h"

namespace attnd::attnload {
namespace {

using std::chrono::seconds;

std::vector<double> Times(ArrivalKind kind, double rate, Nanos window, uint64_t seed) {
  Arrivals arrivals(kind, rate, window, seed);
  std::vector<double> times;
  while (const std::optional<Nanos> at = arrivals.Next()) times.push_back(ToSeconds(*at));
  return times;
}

TEST(ArrivalsTest, ConstantOnesAreEquallyApart) {
  const std::vector<double> times = Times(ArrivalKind::kConstant, 4, seconds(2), 1);
  EXPECT_EQ(times, (std::vector<double>{0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75}));
}

TEST(ArrivalsTest, PoissonHasItsRateAndItsVariance) {
  const std::vector<double> times = Times(ArrivalKind::kPoisson, 50, seconds(2000), 7);
  // 100,000 expected, with a standard deviation of 316; five of those.
  EXPECT_NEAR(static_cast<double>(times.size()), 100000, 1600);
  double sum = 0, squares = 0;
  for (size_t i = 1; i < times.size(); ++i) {
    const double gap = times[i] - times[i - 1];
    sum += gap;
    squares += gap * gap;
  }
  const double n = static_cast<double>(times.size() - 1), mean = sum / n;
  EXPECT_NEAR(mean, 0.02, 0.0004);
  // Exponential gaps: standard deviation equal to the mean, and 1/e of them longer than it.
  EXPECT_NEAR(std::sqrt(squares / n - mean * mean) / mean, 1, 0.03);
  int64_t longer = 0;
  for (size_t i = 1; i < times.size(); ++i) longer += times[i] - times[i - 1] > mean;
  EXPECT_NEAR(static_cast<double>(longer) / n, std::exp(-1), 0.01);
  EXPECT_TRUE(std::is_sorted(times.begin(), times.end()));
}

TEST(ArrivalsTest, NothingBunchesAtTheStart) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const std::vector<double> times = Times(ArrivalKind::kPoisson, 100, seconds(10), seed);
    const auto early = std::count_if(times.begin(), times.end(), [](double t) { return t < 0.1; });
    EXPECT_LT(early, 30) << "of 10 expected, seed " << seed;
  }
}

TEST(ArrivalsTest, ARampGrowsEvenly) {
  const std::vector<double> times = Times(ArrivalKind::kRamp, 100, seconds(10), 1);
  EXPECT_EQ(times.size(), 500u);  // the area of the triangle
  const auto until = [&](double t) { return std::upper_bound(times.begin(), times.end(), t) - times.begin(); };
  EXPECT_NEAR(static_cast<double>(until(5)), 125, 1);  // a quarter by half time
  EXPECT_NEAR(static_cast<double>(until(10) - until(9)), 95, 1);
}

TEST(ArrivalsTest, TheSeedDecides) {
  const auto times = [](uint64_t seed) { return Times(ArrivalKind::kPoisson, 10, seconds(10), seed); };
  EXPECT_EQ(times(3), times(3));
  EXPECT_NE(times(3), times(4));
}

PlanOptions Options() {
  PlanOptions options;
  options.config = {.num_layers = 3, .num_q_heads = 4, .num_kv_heads = 2, .head_dim = 8};
  options.prefill_tokens = 10;
  options.prefill_chunk = 4;
  options.decode_tokens = 2;
  return options;
}

TEST(PlanTest, EveryPositionOfEveryLayerIsWrittenOnceAndInOrder) {
  const PlanOptions options = Options();
  const Plan plan(options, 0);
  ASSERT_EQ(plan.steps(), 3 * 3 + 2 * 3);  // 3 chunks and 2 tokens, through 3 layers
  std::vector<int64_t> length(3, 0);
  for (int64_t i = 0; i < plan.steps(); ++i) {
    const PlannedStep step = plan.StepAt(i);
    EXPECT_EQ(step.position, length[step.layer]);
    EXPECT_EQ(step.prefill, step.position < 10);
    EXPECT_LE(step.tokens, step.prefill ? 4 : 1);
    length[step.layer] += step.tokens;
  }
  EXPECT_EQ(length, (std::vector<int64_t>{12, 12, 12}));
  EXPECT_TRUE(plan.IsLastPrefill(8));
  EXPECT_EQ(plan.StepAt(9).decode_index, 0);
}

TEST(PlanTest, RatesAreSharesOfSessionsAndSteps) {
  PlanOptions options = Options();
  options.check_rate = 0.1;
  options.abandon_rate = 0.2;
  options.cancel_rate = 0.3;
  int checked = 0, abandoned = 0, cancelled = 0;
  constexpr int kSessions = 4000;
  for (int s = 0; s < kSessions; ++s) {
    const Plan plan(options, s);
    checked += plan.check() == CheckKind::kReference;
    abandoned += plan.abandon_at().has_value();
    if (plan.abandon_at()) {
      EXPECT_LT(*plan.abandon_at(), plan.steps());
    }
    cancelled += plan.Cancels(s % plan.steps());
  }
  EXPECT_NEAR(checked, 0.1 * kSessions, 100);
  EXPECT_NEAR(abandoned, 0.2 * kSessions, 130);
  EXPECT_NEAR(cancelled, 0.3 * kSessions, 150);
}

TEST(PlanTest, AReferenceSessionComparesItsEndAndAFewMore) {
  PlanOptions options = Options();
  options.check_rate = 1;
  options.decode_tokens = 1000;
  const Plan plan(options, 5);
  int compared = 0;
  for (int64_t i = 0; i < plan.steps(); ++i) {
    const std::optional<int> head = plan.ReferenceHead(i);
    compared += head.has_value();
    if (head) {
      EXPECT_LT(*head, 2);
    }
  }
  EXPECT_TRUE(plan.ReferenceHead(plan.steps() - 1).has_value());
  EXPECT_TRUE(plan.ReferenceHead(8).has_value());
  EXPECT_GE(compared, 2);
  EXPECT_LE(compared, 30);
}

TEST(PlanTest, ConstantsTellSessionsLayersAndHeadsApart) {
  const PlanOptions options = Options();
  int different = 0, pairs = 0;
  std::set<float> values;
  for (int s = 0; s < 100; ++s) {
    const Plan plan(options, s), other(options, s + 1);
    for (int layer = 0; layer < 3; ++layer) {
      values.insert(plan.Constant(layer, 0));
      different += plan.Constant(layer, 0) != plan.Constant(layer, 1);
      different += plan.Constant(layer, 0) != plan.Constant((layer + 1) % 3, 0);
      different += plan.Constant(layer, 0) != other.Constant(layer, 0);
      pairs += 3;
    }
  }
  EXPECT_GT(different, 0.97 * pairs);
  for (const float a : values) {
    for (const float b : values) {
      if (a != b) {
        EXPECT_GT(std::fabs(a - b) / std::fabs(b), 0.03f) << a << " " << b;  // INT8's bound
      }
    }
  }
}

}  // namespace
}  // namespace attnd::attnload

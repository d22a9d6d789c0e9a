// The search, on systems made of a formula.
#include "client/attnload/capacity.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace attnd::attnload {
namespace {

CapacityResult Search(double first, double max, const std::function<bool(double)>& holds) {
  absl::StatusOr<CapacityResult> result =
      FindCapacity(first, max, [&](double rate) -> absl::StatusOr<Trial> { return Trial{.ok = holds(rate)}; });
  EXPECT_TRUE(result.ok());
  return *result;
}

TEST(CapacityTest, FindsTheEdgeFromAnySideWithinFivePercent) {
  for (const double edge : {0.7, 3.0, 42.0, 99.0, 1000.0, 77777.0}) {
    for (const double first : {1.0, 50.0, 500.0}) {
      const CapacityResult r = Search(first, 1e6, [&](double rate) { return rate <= edge; });
      EXPECT_LE(r.rate, edge);
      EXPECT_GE(r.rate, edge / 1.05) << "edge " << edge << " from " << first;
      EXPECT_TRUE(r.bounded);
      EXPECT_LE(r.trials.size(), 30u);
    }
  }
}

// A queue's latency: service time / (1 - utilisation).
TEST(CapacityTest, AQueueIsHeldBelowItsObjective) {
  const auto p99 = [](double rate) { return rate >= 200 ? 1e9 : 4.6 * 0.005 / (1 - rate / 200); };
  const CapacityResult r = Search(10, 1e6, [&](double rate) { return p99(rate) <= 0.1; });
  EXPECT_NEAR(r.rate, 154, 8);  // 200 * (1 - 4.6 * 0.005 / 0.1)
}

TEST(CapacityTest, EndsAtTheLimitAndSaysSo) {
  const CapacityResult r = Search(10, 100, [](double) { return true; });
  EXPECT_EQ(r.rate, 100);
  EXPECT_FALSE(r.bounded);
  EXPECT_EQ(r.trials.size(), 5u);  // 10, 20, 40, 80, 100
}

TEST(CapacityTest, GivesUpWhereNothingHolds) {
  const CapacityResult r = Search(10, 100, [](double) { return false; });
  EXPECT_EQ(r.rate, 0);
  EXPECT_LE(r.trials.size(), 12u);
}

TEST(CapacityTest, ANoisySystemStillEndsNearItsEdge) {
  std::mt19937_64 random(9);
  for (int i = 0; i < 50; ++i) {
    const CapacityResult r = Search(
        8, 1e6, [&](double rate) { return rate * std::uniform_real_distribution<double>(0.9, 1.1)(random) <= 300; });
    EXPECT_GT(r.rate, 300 / 1.2);
    EXPECT_LT(r.rate, 300 * 1.2);
  }
}

TEST(CapacityTest, ATrialsErrorEndsTheSearch) {
  const absl::Status status =
      FindCapacity(1, 10, [](double) -> absl::StatusOr<Trial> { return absl::UnavailableError("gone"); }).status();
  EXPECT_EQ(status, absl::UnavailableError("gone"));
}

}  // namespace
}  // namespace attnd::attnload

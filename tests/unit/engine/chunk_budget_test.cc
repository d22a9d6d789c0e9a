#include "server/engine/chunk_budget.h"

#include <gtest/gtest.h>

#include <cmath>

namespace attnd {
namespace {

TEST(ChunkBudget, BeginsWithTheEstimateOnAllThreads) {
  EXPECT_NEAR(ChunkBudget(absl::Milliseconds(4), 1).us(), 4000, 1e-6);
  EXPECT_NEAR(ChunkBudget(absl::Milliseconds(4), 8).us(), 32000, 1e-6);
}

TEST(ChunkBudget, FollowsTheSpeedOfRecentBatches) {
  ChunkBudget budget(absl::Milliseconds(4), 1);
  // Three times as fast as estimated.
  for (int i = 0; i < 100; ++i) budget.AddBatch(9000, absl::Microseconds(3000));
  EXPECT_NEAR(budget.us(), 12000, 10);
  // Others take half of the machine.
  for (int i = 0; i < 100; ++i) budget.AddBatch(9000, absl::Microseconds(6000));
  EXPECT_NEAR(budget.us(), 6000, 10);
}

TEST(ChunkBudget, LearnsNothingFromSmallBatches) {
  ChunkBudget budget(absl::Milliseconds(4), 2);
  for (int i = 0; i < 100; ++i) budget.AddBatch(10, absl::Milliseconds(1));
  budget.AddBatch(9000, absl::ZeroDuration());
  EXPECT_NEAR(budget.us(), 8000, 1e-6);
}

TEST(ChunkBudget, AnInfiniteTargetIsNoBound) {
  ChunkBudget budget(absl::InfiniteDuration(), 2);
  budget.AddBatch(9000, absl::Seconds(100));
  EXPECT_TRUE(std::isinf(budget.us()));
}

}  // namespace
}  // namespace attnd

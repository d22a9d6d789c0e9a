#include "server/engine/delay_estimate.h"

#include <gtest/gtest.h>

namespace attnd {
namespace {

double Ms(absl::Duration duration) { return absl::ToDoubleMilliseconds(duration); }

TEST(DelayEstimate, KnowsNothingBeforeTheFirstBatch) {
  const DelayEstimate estimate;
  EXPECT_EQ(estimate.OfPrefill(1'000'000), absl::ZeroDuration());
  EXPECT_EQ(estimate.OfDecode(1000), absl::ZeroDuration());
}

TEST(DelayEstimate, PrefillsWaitForTheTokensAheadAtTheRateOfRecentBatches) {
  DelayEstimate estimate;
  for (int i = 0; i < 50; ++i) estimate.AddBatch(256, 0, false, absl::Milliseconds(10));
  EXPECT_NEAR(Ms(estimate.OfPrefill(25'600)), 1000, 1);
  EXPECT_EQ(estimate.OfPrefill(0), absl::ZeroDuration());
  // The machine has become four times as slow: within some ten batches the estimate follows.
  for (int i = 0; i < 30; ++i) estimate.AddBatch(256, 0, false, absl::Milliseconds(40));
  EXPECT_NEAR(Ms(estimate.OfPrefill(25'600)), 4000, 200);
}

TEST(DelayEstimate, ASmallBatchWeighsWhatItIsWorth) {
  DelayEstimate estimate;
  for (int i = 0; i < 50; ++i) {
    estimate.AddBatch(256, 0, false, absl::Milliseconds(10));
    estimate.AddBatch(9, 0, false, absl::Milliseconds(2));  // 22 times as slow by the token
  }
  EXPECT_NEAR(Ms(estimate.OfPrefill(265)), 12, 0.5);
}

TEST(DelayEstimate, DecodesWaitForBatchesNotForEachOther) {
  DelayEstimate estimate;
  for (int i = 0; i < 50; ++i) estimate.AddBatch(0, 64, false, absl::Milliseconds(20));
  EXPECT_EQ(estimate.OfDecode(0), absl::ZeroDuration());
  EXPECT_NEAR(Ms(estimate.OfDecode(1)), 20, 0.1);
  EXPECT_NEAR(Ms(estimate.OfDecode(64)), 20, 0.1);
  EXPECT_NEAR(Ms(estimate.OfDecode(640)), 200, 1);
  EXPECT_EQ(estimate.OfPrefill(1000), absl::ZeroDuration()) << "there was none";
}

TEST(DelayEstimate, PrefillsBesideDecodesSlowBothDown) {
  DelayEstimate estimate;
  // In turns: each waits for its own batches and for the other's.
  for (int i = 0; i < 50; ++i) {
    estimate.AddBatch(256, 0, true, absl::Milliseconds(5));
    estimate.AddBatch(0, 10, true, absl::Milliseconds(50));
  }
  EXPECT_NEAR(Ms(estimate.OfPrefill(256)), 55, 3);
  EXPECT_NEAR(Ms(estimate.OfPrefill(2560)), 550, 30);
  EXPECT_NEAR(Ms(estimate.OfDecode(10)), 55, 3);
}

TEST(DelayEstimate, BatchesForWhichNobodyWaitedSlowNobodyDown) {
  DelayEstimate estimate;
  for (int i = 0; i < 50; ++i) {
    estimate.AddBatch(256, 0, false, absl::Milliseconds(5));
    estimate.AddBatch(0, 10, false, absl::Milliseconds(50));
  }
  EXPECT_NEAR(Ms(estimate.OfPrefill(256)), 5, 0.1);
  EXPECT_NEAR(Ms(estimate.OfDecode(10)), 50, 0.1);
}

}  // namespace
}  // namespace attnd

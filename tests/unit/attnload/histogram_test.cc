// Quantiles against a sorted list of the same samples.
#include "client/attnload/histogram.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace attnd::attnload {
namespace {

constexpr double kAll[] = {0, 0.001, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.99999, 1};

int64_t Exact(const std::vector<int64_t>& sorted, double quantile) {
  const auto rank = static_cast<int64_t>(std::ceil(quantile * static_cast<double>(sorted.size())));
  return sorted[static_cast<size_t>(std::clamp<int64_t>(rank - 1, 0, static_cast<int64_t>(sorted.size()) - 1))];
}

void ExpectClose(const Histogram& h, std::vector<int64_t> samples, double relative) {
  std::sort(samples.begin(), samples.end());
  ASSERT_EQ(h.count(), static_cast<int64_t>(samples.size()));
  for (const double q : kAll) {
    const auto exact = static_cast<double>(Exact(samples, q));
    EXPECT_NEAR(static_cast<double>(h.Quantile(q).count()), exact, exact * relative + 0.5) << "at " << q;
  }
  EXPECT_EQ(h.max().count(), samples.back());
  EXPECT_EQ(h.min().count(), samples.front());
  double sum = 0;
  for (const int64_t s : samples) sum += static_cast<double>(s) * 1e-9;
  EXPECT_NEAR(h.MeanSeconds(), sum / static_cast<double>(samples.size()), 1e-9);
}

class HistogramAccuracy : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Precisions, HistogramAccuracy, ::testing::Values(5, 8));

TEST_P(HistogramAccuracy, IsWithinHalfABucketOfTheSortedSamples) {
  std::mt19937_64 random(42);
  std::lognormal_distribution<double> long_tailed(12, 2.5);  // around 160 us, up to minutes
  Histogram h(GetParam());
  std::vector<int64_t> samples;
  for (int i = 0; i < 200000; ++i) {
    samples.push_back(static_cast<int64_t>(long_tailed(random)));
    h.Record(Nanos(samples.back()));
  }
  ExpectClose(h, samples, std::pow(2, -(GetParam() + 1)));
}

TEST_P(HistogramAccuracy, HoldsAtEveryPowerOfTwo) {
  const double relative = std::pow(2, -(GetParam() + 1));
  for (int bit = 0; bit < 62; ++bit) {
    for (const int64_t offset : {-1, 0, 1}) {
      const int64_t value = (int64_t{1} << bit) + offset;
      Histogram h(GetParam());
      // The largest is exact by itself; the median is the bucket's.
      for (const int64_t sample : {value, value, value, 2 * value + 1}) h.Record(Nanos(sample));
      EXPECT_NEAR(static_cast<double>(h.Quantile(0.5).count()), static_cast<double>(value),
                  static_cast<double>(value) * relative + 0.5)
          << value;
    }
  }
}

TEST(HistogramTest, WithoutSamplesEverythingIsZero) {
  const Histogram h;
  EXPECT_EQ(h.Quantile(0.99), Nanos(0));
  EXPECT_EQ(h.max(), Nanos(0));
  EXPECT_EQ(h.MeanSeconds(), 0);
}

TEST(HistogramTest, OneSampleIsEveryQuantile) {
  Histogram h;
  h.Record(Nanos(123456789));
  for (const double q : kAll) EXPECT_EQ(h.Quantile(q), Nanos(123456789));
}

TEST(HistogramTest, NegativeCountsAsZero) {
  Histogram h;
  h.Record(Nanos(-5));
  EXPECT_EQ(h.max(), Nanos(0));
  EXPECT_EQ(h.count(), 1);
}

TEST(HistogramTest, MergingIsRecordingBoth) {
  std::mt19937_64 random(1);
  Histogram a, b, both;
  for (int i = 0; i < 5000; ++i) {
    const Nanos small(static_cast<int64_t>(random() % 1000)), large(static_cast<int64_t>(random() % 1000000000));
    a.Record(small);
    b.Record(large);
    both.Record(small);
    both.Record(large);
  }
  a.Merge(b);
  a.Merge(Histogram());
  for (const double q : kAll) EXPECT_EQ(a.Quantile(q), both.Quantile(q));
  EXPECT_EQ(a.count(), both.count());
  EXPECT_EQ(a.min(), both.min());
}

}  // namespace
}  // namespace attnd::attnload

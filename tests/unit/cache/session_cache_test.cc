#include "server/cache/session_cache.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <tuple>
#include <vector>

#include "tests/unit/cache/cache_harness.h"

namespace attnd {
namespace {

TEST(SessionCache, AppendsInPlaceAndOnlyThen) {
  auto pool = MakePool(100);
  SessionCache cache(pool.get(), kBlockBytes, 1, 2);
  EXPECT_EQ(cache.BlocksToStage(0, 0, 1), 2);
  Append(&cache, 0, 0, 10, 2, 0);
  EXPECT_EQ(cache.used_bytes(), 2 * static_cast<int64_t>(kBlockBytes));
  EXPECT_EQ(cache.BlocksToStage(0, 10, 54), 0);
  EXPECT_EQ(cache.BlocksToStage(0, 10, 55), 2);
  EXPECT_EQ(cache.BlocksToStage(0, 9, 1), 2);   // a replay
  EXPECT_EQ(cache.BlocksToStage(0, 0, 10), 2);  // of everything
  EXPECT_TRUE(cache.Release(1000));
}

TEST(SessionCache, AbortLeavesEverythingAsItWas) {
  auto pool = MakePool(100);
  SessionCache cache(pool.get(), kBlockBytes, 1, 1);
  Append(&cache, 0, 0, 70, 1, 5000);
  const int64_t used = pool->gauges().used_bytes;
  for (const int64_t start : {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{64}, int64_t{69}, int64_t{70}}) {
    for (const int64_t tokens : {1, 57, 58, 59, 200}) {
      StagedAppend staged;
      ASSERT_TRUE(cache.Stage(0, start, tokens, &staged));
      Write(cache, staged, 1, 9000);
      cache.Abort(&staged);
      EXPECT_EQ(cache.length(0), 70);
      EXPECT_EQ(pool->gauges().used_bytes, used);
      for (int64_t p = 0; p < 70; p++) ASSERT_EQ(Read(cache, 0, p, 0), 5000 + p) << start << " " << tokens;
    }
  }
  EXPECT_TRUE(cache.Release(1000));
}

TEST(SessionCache, StagesNothingWithoutMemory) {
  auto pool = MakePool(3);
  SessionCache cache(pool.get(), kBlockBytes, 1, 1);
  Append(&cache, 0, 0, 100, 1, 0);
  StagedAppend staged;
  EXPECT_FALSE(cache.Stage(0, 100, 93, &staged));
  EXPECT_FALSE(staged.active);
  EXPECT_TRUE(cache.Stage(0, 100, 92, &staged));
  cache.Commit(&staged);
  EXPECT_EQ(cache.length(0), 192);
  EXPECT_EQ(cache.BlocksWith(0, 100, 93), 4);
  EXPECT_TRUE(cache.Release(1000));
}

TEST(SessionCache, DrawsFromItsReserve) {
  auto pool = MakePool(8);
  SessionCache cache(pool.get(), kBlockBytes, 2, 2), other(pool.get(), kBlockBytes, 1, 1);
  EXPECT_FALSE(cache.Reserve(129));
  ASSERT_TRUE(cache.Reserve(128));
  StagedAppend staged;
  EXPECT_FALSE(other.Stage(0, 0, 1, &staged));
  Append(&cache, 0, 0, 128, 2, 0);
  Append(&cache, 1, 0, 128, 2, 0);
  EXPECT_EQ(cache.reserved_bytes(), cache.used_bytes());
  EXPECT_TRUE(cache.Release(1000));
  EXPECT_EQ(pool->gauges().reserved_bytes, 0);
  EXPECT_TRUE(other.Release(1000));
}

TEST(SessionCache, ReleasesInSlices) {
  auto pool = MakePool(1000);
  SessionCache cache(pool.get(), kBlockBytes, 3, 4);
  for (int layer = 0; layer < 3; layer++) Append(&cache, layer, 0, 1000, 4, 0);
  const int64_t held = pool->gauges().used_bytes / static_cast<int64_t>(kBlockBytes);
  EXPECT_EQ(held, 3 * 16 * 4);
  int slices = 1;
  while (!cache.Release(10)) slices++;
  EXPECT_GE(slices, held / 12);
  EXPECT_EQ(pool->gauges().used_bytes, 0);
  EXPECT_EQ(pool->gauges().tokens, 0);
}

// A session of a step's life, at random, against a plain map.
TEST(SessionCache, RandomStepsAgainstAModel) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  constexpr int kLayers = 3, kHeads = 2;
  auto pool = MakePool(60);
  SessionCache cache(pool.get(), kBlockBytes, kLayers, kHeads);
  std::map<std::pair<int, int64_t>, int64_t> model;  // layer, position -> stamp + position
  int64_t lengths[kLayers] = {};
  for (int step = 0; step < 5000; step++) {
    const int layer = static_cast<int>(below(kLayers));
    const int64_t length = lengths[layer];
    if (below(10) == 0) {
      const int64_t cut = below(length + 1);
      cache.Truncate(layer, cut);
      lengths[layer] = cut;
    } else {
      const int64_t start = below(3) > 0 ? length : below(length + 1);
      const int64_t tokens = 1 + below(below(2) ? 150 : 4);
      const int64_t stamp = static_cast<int64_t>(step) << 32;
      StagedAppend staged;
      if (!cache.Stage(layer, start, tokens, &staged)) {
        ASSERT_GT(cache.BlocksToStage(layer, start, tokens), 60 - cache.used_bytes() / int64_t{kBlockBytes});
        cache.Truncate(layer, lengths[layer] = length / 2);
      } else {
        Write(cache, staged, kHeads, stamp);
        if (below(4) == 0) {
          cache.Abort(&staged);
        } else {
          cache.Commit(&staged);
          lengths[layer] = start + tokens;
          for (int64_t p = start; p < start + tokens; p++) model[{layer, p}] = stamp + p;
        }
      }
    }
    int64_t blocks = 0, longest = 0;
    for (int l = 0; l < kLayers; l++) {
      ASSERT_EQ(cache.length(l), lengths[l]);
      blocks += cache.BlocksFor(lengths[l]);
      longest = std::max(longest, lengths[l]);
      for (int64_t p = 0; p < lengths[l]; p++) {
        for (int h = 0; h < kHeads; h++) ASSERT_EQ(Read(cache, l, p, h), (model[{l, p}]) + h * 1000003);
      }
    }
    ASSERT_EQ(cache.used_bytes(), blocks * static_cast<int64_t>(kBlockBytes));
    ASSERT_EQ(pool->gauges().used_bytes, cache.used_bytes());
    ASSERT_EQ(cache.longest(), longest);
    ASSERT_EQ(pool->gauges().tokens, longest);
  }
  EXPECT_TRUE(cache.Release(1000));
  EXPECT_EQ(pool->gauges().used_bytes, 0);
}

}  // namespace
}  // namespace attnd

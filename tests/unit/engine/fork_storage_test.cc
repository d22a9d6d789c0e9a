// Forks and reorders of sessions of which some are on disk.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/unit/engine/storage_fixture.h"

namespace attnd {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::Pointwise;

using ForkStorage = StorageFixture;

TEST_F(ForkStorage, AForkBringsItsParentBack) {
  Harness h(SpillOptions(4));
  const std::string parent = h.Create();
  ASSERT_TRUE(h.Mean(parent, {1, 2, 3, 100}).status.ok());
  Push(&h, parent);
  const std::string child = h.Fork(parent, 3);
  EXPECT_EQ(h.engine->GetSession(parent)->spilled_bytes, 0);
  EXPECT_THAT(h.Mean(child, {9}).out, ElementsAre(3.75f));
  EXPECT_THAT(h.Mean(parent, {94}).out, ElementsAre(40));
}

// Those that share all their blocks stay while others can go, for they would free nothing.
TEST_F(ForkStorage, BothSidesOfAForkComeBackFromDisk) {
  Harness h(SpillOptions(6));
  const std::string parent = h.Create();
  ASSERT_TRUE(h.Mean(parent, std::vector<float>(100, 2)).status.ok());
  const std::string child = h.Fork(parent);
  EXPECT_THAT(h.Mean(child, {103}).out, ElementsAre(3)) << "a copy of the second block";
  Push(&h, parent);
  Push(&h, child);
  EXPECT_THAT(h.Mean(child, {105}).out, ElementsAre(4));
  EXPECT_THAT(h.Mean(parent, {103}).out, ElementsAre(3));
}

TEST_F(ForkStorage, AReorderBringsAllItsRowsBack) {
  Harness h(SpillOptions(6));
  const std::string a = h.Create(), b = h.Create(), c = h.Create();
  ASSERT_TRUE(h.Mean(a, {1}).status.ok());
  ASSERT_TRUE(h.Mean(b, {2, 2}).status.ok());
  ASSERT_TRUE(h.Mean(c, {3, 3, 3}).status.ok());
  Push(&h, a);
  Push(&h, c);
  EXPECT_THAT(h.Reorder({a, b, c}, {2, 0, 2}).value(), ElementsAre(3, 1, 3));
  EXPECT_THAT(h.Mean(a, {3}).out, ElementsAre(3));
  EXPECT_THAT(h.Mean(b, {3}).out, ElementsAre(2));
  EXPECT_THAT(h.Mean(c, {7}).out, ElementsAre(4));
}

// What each session's values are, beside what they should be.
TEST_F(ForkStorage, RandomForksReordersAndStepsAmongSpills) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  constexpr int kSessions = 20, kMostTokens = 150;
  Harness h(SpillOptions(20));
  struct Twin {
    std::string id;
    std::vector<float> values;
  };
  std::vector<Twin> twins(kSessions);
  for (Twin& twin : twins) twin.id = h.Create();
  const auto any = [&]() -> Twin& { return twins[random() % kSessions]; };
  for (int step = 0; step < (kThreadSanitizer ? 200 : 1500); step++) {
    SCOPED_TRACE(absl::StrCat("step ", step));
    Twin& twin = any();
    switch (random() % 6) {
      case 0: {
        Twin& child = any();
        if (&child == &twin) break;
        const int64_t length = random() % (twin.values.size() + 1);
        ASSERT_TRUE(h.engine->CloseSession(child.id).value());
        child.id = h.Fork(twin.id, length);
        child.values.assign(twin.values.begin(), twin.values.begin() + length);
        break;
      }
      case 1: {
        std::shuffle(twins.begin(), twins.end(), random);
        std::vector<int> sources = {int(random() % 3), int(random() % 3), int(random() % 3)};
        const absl::StatusOr<std::vector<int64_t>> lengths =
            h.Reorder({twins[0].id, twins[1].id, twins[2].id}, sources);
        ASSERT_TRUE(lengths.ok()) << lengths.status();
        const std::vector<Twin> before(twins.begin(), twins.begin() + 3);
        for (int i = 0; i < 3; i++) twins[i].values = before[sources[i]].values;
        break;
      }
      default: {
        std::vector<float> tokens(1 + random() % 40);
        if (twin.values.size() + tokens.size() > kMostTokens) {
          ASSERT_TRUE(h.Rewind(twin.id, 10).ok());
          twin.values.resize(10);
        }
        double sum = 0;
        for (const float x : twin.values) sum += x;
        std::vector<float> expected;
        for (float& x : tokens) {
          sum += x = static_cast<float>(random() % 100);
          twin.values.push_back(x);
          expected.push_back(static_cast<float>(sum / static_cast<double>(twin.values.size())));
        }
        const StepAnswer answer = h.Mean(twin.id, tokens);
        ASSERT_TRUE(answer.status.ok()) << answer.status;
        ASSERT_THAT(answer.out, Pointwise(FloatNear(1e-3f), expected));
      }
    }
    const EngineStats stats = h.engine->stats();
    ASSERT_LE(stats.used_bytes, stats.reserved_bytes);
    ASSERT_LE(stats.reserved_bytes, stats.capacity_bytes);
  }
  EXPECT_GT(h.observer["snapshot spill"], 10);
  EXPECT_GT(h.observer["snapshot restore"], 10);
  for (const Twin& twin : twins) EXPECT_TRUE(h.engine->CloseSession(twin.id).value());
  for (int i = 0; i < 500 && h.used_bytes() > 0; i++) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(h.used_bytes(), 0);
  EXPECT_EQ(h.engine->stats().shared_bytes, 0);
}

}  // namespace
}  // namespace attnd

// Memory is short and --eviction=lru without a spill directory: which sessions are dropped, and which never.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/engine/engine_harness.h"

namespace attnd {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::SizeIs;

// Bytes of one block of the tiny shape: 64 tokens of K and V, one float each.
constexpr int64_t kTinyBlock = 512;

EngineOptions LruOptions(int64_t blocks) {
  EngineOptions options = Harness::DefaultOptions();
  options.kv_cache_bytes = blocks * kTinyBlock;
  options.evict_lru = true;
  return options;
}

std::vector<float> Constant(int count, float value) { return std::vector<float>(count, value); }

TEST(Eviction, TheSessionThatWasIdleLongestMakesRoomAndItsIdSaysSo) {
  Harness h(LruOptions(3));
  const std::string a = h.Create(), b = h.Create(), c = h.Create(), d = h.Create();
  for (const std::string& id : {a, b, c}) ASSERT_TRUE(h.Mean(id, {1, 3}).status.ok());
  ASSERT_TRUE(h.Mean(a, {2}).status.ok());  // b is the oldest now
  EXPECT_THAT(h.Mean(d, {7}).out, ElementsAre(7));
  EXPECT_EQ(h.Mean(b, {1}).reason(), "EVICTED");
  EXPECT_EQ(h.Mean(b, {1}).status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(h.engine->CloseSession(b).value(), false);
  EXPECT_THAT(h.Mean(a, {6}).out, ElementsAre(3));
  EXPECT_THAT(h.Mean(c, {5}).out, ElementsAre(3));
  EXPECT_EQ(h.observer["evicted"], 1);
  EXPECT_EQ(h.observer["dropped"], 1);
  EXPECT_EQ(h.engine->stats().sessions_active, 3);
}

TEST(Eviction, WithoutItTheRequestIsRefusedAndNobodyGoes) {
  EngineOptions options = LruOptions(2);
  options.evict_lru = false;
  Harness h(options);
  const std::string a = h.Create(), b = h.Create(), c = h.Create();
  for (const std::string& id : {a, b}) ASSERT_TRUE(h.Mean(id, {1}).status.ok());
  EXPECT_EQ(h.Mean(c, {1}).reason(), "CACHE_FULL");
  EXPECT_THAT(h.Mean(a, {3}).out, ElementsAre(2));
  EXPECT_THAT(h.Mean(b, {3}).out, ElementsAre(2));
}

TEST(Eviction, NobodyGoesForARequestThatWouldNotFitAllTheSame) {
  Harness h(LruOptions(4));
  const std::string a = h.Create(), b = h.Create();
  ASSERT_TRUE(h.Mean(a, {1}).status.ok());
  SessionConfig reserved = TinyConfig();
  reserved.reserve_tokens = 128;
  const std::string r = h.Create(reserved);
  // Three blocks beside the two that are promised: not even without a.
  const StepAnswer refused = h.Mean(b, Constant(129, 1));
  EXPECT_EQ(refused.reason(), "CACHE_FULL");
  EXPECT_GT(GetErrorDetails(refused.status).retry_delay, absl::ZeroDuration());
  // Never.
  EXPECT_EQ(h.Mean(b, Constant(300, 1)).reason(), "TOO_MANY_TOKENS");
  EXPECT_THAT(h.Mean(a, {3}).out, ElementsAre(2));
  EXPECT_EQ(h.observer["evicted"], 0);
}

TEST(Eviction, BlocksThatForksShareAreFreeOnlyOnceAllOfThemAreGone) {
  Harness h(LruOptions(4));
  const std::string parent = h.Create();
  ASSERT_TRUE(h.Mean(parent, Constant(128, 1)).status.ok());
  const auto fork = [&](const std::string& id) {
    std::promise<absl::StatusOr<SessionInfo>> forked;
    h.engine->ForkSession(id, {}, [&](absl::StatusOr<SessionInfo> info) { forked.set_value(std::move(info)); });
    return forked.get_future().get()->session_id;
  };
  const std::string child = fork(parent), empty = h.Create();
  SessionConfig reserved = TinyConfig();
  reserved.reserve_tokens = 64;
  const std::string r = h.Create(reserved), asks = h.Create();
  // With both gone there would be three blocks and not the four that it asks for, though each of them holds two.
  EXPECT_EQ(h.Mean(asks, Constant(256, 1)).reason(), "CACHE_FULL");
  EXPECT_EQ(h.observer["evicted"], 0);
  StepArgs append = Harness::MeanArgs(asks, Constant(192, 1));
  append.q.clear();
  EXPECT_TRUE(h.Step(std::move(append)).status.ok());
  EXPECT_EQ(h.observer["evicted"], 2);
  EXPECT_EQ(h.Mean(parent, {1}).reason(), "EVICTED");
  EXPECT_EQ(h.Mean(child, {1}).reason(), "EVICTED");
  EXPECT_EQ(h.Length(empty), 0);  // would have freed nothing
}

TEST(Eviction, ASessionToWhichMemoryIsPromisedStays) {
  Harness h(LruOptions(2));
  SessionConfig reserved = TinyConfig();
  reserved.reserve_tokens = 64;
  const std::string r = h.Create(reserved), a = h.Create(), b = h.Create();
  ASSERT_TRUE(h.Mean(r, {1}).status.ok());
  ASSERT_TRUE(h.Mean(a, {1}).status.ok());
  ASSERT_TRUE(h.Mean(b, {1}).status.ok());  // instead of a, though r was idle longer
  EXPECT_EQ(h.Mean(a, {1}).reason(), "EVICTED");
  EXPECT_THAT(h.Mean(r, {3}).out, ElementsAre(2));
}

TEST(Eviction, RoomIsMadeOnlyForWhatIsNotPromisedAlready) {
  Harness h(LruOptions(4));
  const std::string a = h.Create();
  ASSERT_TRUE(h.Mean(a, {1}).status.ok());
  SessionConfig reserved = TinyConfig();
  reserved.reserve_tokens = 128;
  const std::string r = h.Create(reserved);
  // Four blocks, of which two are promised, one is free and a has one.
  EXPECT_TRUE(h.Mean(r, Constant(256, 1)).status.ok());
  EXPECT_EQ(h.Mean(a, {1}).reason(), "EVICTED");
}

TEST(Eviction, AReservationMakesRoomToo) {
  Harness h(LruOptions(4));
  std::vector<std::string> ids;
  for (int i = 0; i < 4; i++) ASSERT_TRUE(h.Mean(ids.emplace_back(h.Create()), {1}).status.ok());
  SessionConfig reserved = TinyConfig();
  reserved.reserve_tokens = 192;
  const std::string r = h.Create(reserved);
  EXPECT_EQ(h.engine->stats().reserved_bytes, 4 * kTinyBlock);
  EXPECT_EQ(h.engine->stats().used_bytes, kTinyBlock);
  EXPECT_THAT(h.Mean(ids[3], {3}).out, ElementsAre(2));
  EXPECT_EQ(h.Mean(ids[2], {3}).reason(), "EVICTED");
  reserved.reserve_tokens = 320;  // never
  const absl::Status never = h.TryCreate(reserved).status();
  EXPECT_EQ(GetErrorDetails(never).reason, "CACHE_FULL");
  EXPECT_EQ(GetErrorDetails(never).retry_delay, absl::ZeroDuration());
  EXPECT_THAT(h.Mean(ids[3], {5}).out, ElementsAre(3));
}

TEST(Eviction, ASessionWithAStepInFlightStays) {
  Gate gate;
  EngineOptions options = LruOptions(2);
  options.compute_hook = gate.hook();
  Harness h(options);
  gate.Open();
  const std::string a = h.Create(), b = h.Create(), c = h.Create();
  ASSERT_TRUE(h.Mean(a, {1}).status.ok());
  ASSERT_TRUE(h.Mean(b, {1}).status.ok());
  gate.Close();
  std::future<StepAnswer> on_b = h.Start(Harness::MeanArgs(b, {3}));
  gate.AwaitArrival(3);
  std::future<StepAnswer> on_c = h.Start(Harness::MeanArgs(c, {4}));
  // When c's step is taken up, these two wait.
  std::future<StepAnswer> on_a = h.Start(Harness::MeanArgs(a, {3}));
  std::future<StepAnswer> again_on_b = h.Start(Harness::MeanArgs(b, {5}));
  gate.Open();
  EXPECT_THAT(on_b.get().out, ElementsAre(2));
  EXPECT_THAT(again_on_b.get().out, ElementsAre(3));
  EXPECT_THAT(on_a.get().out, ElementsAre(2));
  EXPECT_EQ(on_c.get().reason(), "CACHE_FULL");
  EXPECT_EQ(h.observer["evicted"], 0);
  EXPECT_THAT(h.Mean(c, {4}).out, ElementsAre(4));  // now one of them is idle
  EXPECT_EQ(h.observer["evicted"], 1);
}

TEST(Eviction, BlocksOfOtherSizesMakeRoomToo) {
  EngineOptions options = LruOptions(1);
  options.kv_cache_bytes = int64_t{4} << 20;
  Harness h(options);
  SessionConfig large = TinyConfig();
  large.shape = {128, 128, KvDType::kF32};
  std::vector<std::string> small;
  for (int i = 0; i < 64; i++) {
    StepArgs args = Harness::MeanArgs(small.emplace_back(h.Create()), Constant(64 * 128, 1));
    args.q.clear();  // append only
    ASSERT_TRUE(h.Step(std::move(args)).status.ok()) << i;
  }
  const std::string id = h.Create(large);
  StepArgs args;
  args.segments.push_back({id, 64 * 60, {}, false, {}});
  args.k.assign(64 * 60 * 128, 0);
  args.v.assign(64 * 60 * 128, 2);
  EXPECT_TRUE(h.Step(std::move(args)).status.ok());
  EXPECT_EQ(h.Length(id), 64 * 60);
  EXPECT_LE(h.engine->stats().used_bytes, options.kv_cache_bytes);
}

}  // namespace
}  // namespace attnd

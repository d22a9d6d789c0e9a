// Forks: a child begins as its parent is, shares its blocks, and neither notices the other (scenarios S12, S14, M03).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "tests/unit/engine/engine_harness.h"

namespace attnd {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::HasSubstr;

// Bytes of one block of the tiny shape: 64 tokens of K and V, one float each.
constexpr int64_t kTinyBlock = 512;

std::vector<float> Range(int first, int last) {
  std::vector<float> out(last - first + 1);
  std::iota(out.begin(), out.end(), static_cast<float>(first));
  return out;
}

float MeanTo(int64_t count, float next) {  // of 1..count and `next`
  return (static_cast<float>(count * (count + 1) / 2) + next) / static_cast<float>(count + 1);
}

std::string ReasonOf(const absl::Status& status) { return GetErrorDetails(status).reason; }

TEST(Fork, S14ChildAndParentGoTheirOwnWays) {
  Harness h;
  const std::string parent = h.Create();
  h.Mean(parent, {1, 2, 3});
  const std::string child = h.Fork(parent);
  EXPECT_THAT(h.Mean(child, {9}).out, ElementsAre(3.75f));
  EXPECT_THAT(h.Mean(parent, {6}).out, ElementsAre(3.0f));
  EXPECT_TRUE(h.engine->CloseSession(parent).value());
  EXPECT_THAT(h.Mean(child, {9}).out, ElementsAre(FloatEq(4.8f)));
  EXPECT_EQ(h.used_bytes(), kTinyBlock);
  EXPECT_TRUE(h.engine->CloseSession(child).value());
  EXPECT_EQ(h.used_bytes(), 0);
  EXPECT_EQ(h.observer["forked"], 1);
  EXPECT_EQ(h.observer["created"], 1);
}

// Whoever writes first takes a block of his own; the last to hold one writes in place.
TEST(Fork, S14AtEveryPlaceInABlockAndInEveryOrder) {
  constexpr int kTokens = 200;
  for (const int64_t at : {0, 1, 33, 63, 64, 65, 127, 128, 130, 199, 200}) {
    for (const bool child_first : {false, true}) {
      for (const bool close_parent : {false, true}) {
        SCOPED_TRACE(testing::Message() << at << " child first " << child_first << " close " << close_parent);
        Harness h;
        const std::string parent = h.Create();
        h.Mean(parent, Range(1, kTokens));
        const std::string child = h.Fork(parent, at);
        EXPECT_EQ(h.Length(child), at);
        EXPECT_EQ(h.used_bytes(), 4 * kTinyBlock);
        EXPECT_EQ(h.engine->stats().shared_bytes, (at + 63) / 64 * kTinyBlock);
        const auto step_child = [&] { EXPECT_THAT(h.Mean(child, {5}).out, ElementsAre(FloatEq(MeanTo(at, 5)))); };
        if (child_first) step_child();
        if (close_parent) {
          EXPECT_TRUE(h.engine->CloseSession(parent).value());
        } else {
          EXPECT_THAT(h.Mean(parent, {7}).out, ElementsAre(FloatEq(MeanTo(kTokens, 7))));
        }
        if (!child_first) step_child();
        EXPECT_THAT(h.Mean(child, {1000}).out,
                    ElementsAre(FloatEq((MeanTo(at, 5) * static_cast<float>(at + 1) + 1000) / (at + 2))));
        EXPECT_TRUE(h.engine->CloseSession(child).value());
        if (!close_parent) {
          EXPECT_THAT(h.Mean(parent, {7}, kTokens).out, ElementsAre(FloatEq(MeanTo(kTokens, 7)))) << "a replay";
          EXPECT_TRUE(h.engine->CloseSession(parent).value());
        }
        EXPECT_EQ(h.used_bytes(), 0);
        EXPECT_EQ(h.engine->stats().shared_bytes, 0);
      }
    }
  }
}

TEST(Fork, OfAForkAndOfThatOne) {
  Harness h;
  std::vector<std::string> line = {h.Create()};
  h.Mean(line[0], Range(1, 100));
  for (int i = 1; i < 8; i++) {
    line.push_back(h.Fork(line.back()));
    const auto n = static_cast<float>(100 + i);
    EXPECT_THAT(h.Mean(line.back(), {n}).out, ElementsAre(FloatEq((n + 1) / 2)));
  }
  // The first block is everyone's, the second each one's own.
  EXPECT_EQ(h.used_bytes(), 9 * kTinyBlock);
  EXPECT_EQ(h.engine->stats().shared_bytes, kTinyBlock);
  for (const int i : {3, 0, 7, 1}) EXPECT_TRUE(h.engine->CloseSession(line[i]).value());
  for (const int i : {2, 4, 5, 6}) {
    const auto n = static_cast<float>(101 + i);
    EXPECT_THAT(h.Mean(line[i], {n}).out, ElementsAre(FloatEq((n + 1) / 2))) << i;
    EXPECT_TRUE(h.engine->CloseSession(line[i]).value());
  }
  EXPECT_EQ(h.used_bytes(), 0);
}

TEST(Fork, S12RewindsAcrossSharedBlocks) {
  for (int64_t cut = 0; cut <= 6; cut++) {
    for (const bool rewind_child : {false, true}) {
      SCOPED_TRACE(testing::Message() << cut << " " << rewind_child);
      Harness h;
      const std::string parent = h.Create();
      h.Mean(parent, Range(1, 6));
      const std::string child = h.Fork(parent);
      const std::string& one = rewind_child ? child : parent;
      const std::string& other = rewind_child ? parent : child;
      ASSERT_TRUE(h.Rewind(one, cut).ok());
      EXPECT_THAT(h.Mean(one, {9}).out, ElementsAre(FloatEq(MeanTo(cut, 9))));
      EXPECT_THAT(h.Mean(other, {9}).out, ElementsAre(FloatEq(MeanTo(6, 9))));
      // A step that cuts first does the same.
      EXPECT_THAT(h.Mean(other, {8}, cut, /*rewind=*/true).out, ElementsAre(FloatEq(MeanTo(cut, 8))));
      EXPECT_THAT(h.Mean(one, {9}, cut).out, ElementsAre(FloatEq(MeanTo(cut, 9)))) << "a replay";
    }
  }
}

TEST(Fork, M03SharedBlocksCountOnce) {
  Harness h;
  const std::string parent = h.Create();
  h.Mean(parent, Range(1, 256));
  const std::string child = h.Fork(parent);
  EngineStats stats = h.engine->stats();
  EXPECT_EQ(stats.used_bytes, 4 * kTinyBlock);
  EXPECT_EQ(stats.shared_bytes, 4 * kTinyBlock);  // 256 tokens
  EXPECT_EQ(stats.cache_tokens, 512);
  EXPECT_EQ(h.engine->GetSession(child)->used_bytes, 4 * kTinyBlock);
  EXPECT_TRUE(h.engine->CloseSession(parent).value());
  stats = h.engine->stats();
  EXPECT_EQ(stats.used_bytes, 4 * kTinyBlock);
  EXPECT_EQ(stats.shared_bytes, 0);
  EXPECT_EQ(stats.cache_tokens, 256);
  EXPECT_TRUE(h.engine->CloseSession(child).value());
  stats = h.engine->stats();
  EXPECT_EQ(stats.used_bytes + stats.reserved_bytes + stats.shared_bytes + stats.cache_tokens, 0);
}

TEST(Fork, OfLayersOfUnequalLength) {
  Harness h;
  SessionConfig config = TinyConfig();
  config.num_layers = 3;
  const std::string parent = h.Create(config);
  const int lengths[] = {70, 10, 0};
  for (int layer = 0; layer < 2; layer++) {
    StepArgs args = Harness::MeanArgs(parent, Range(1, lengths[layer]));
    args.layer = layer;
    ASSERT_TRUE(h.Step(args).status.ok());
  }
  EXPECT_THAT(h.TryFork(parent)->layer_lengths, ElementsAre(70, 10, 0));
  EXPECT_THAT(h.TryFork(parent, 65)->layer_lengths, ElementsAre(65, 10, 0));
  EXPECT_THAT(h.TryFork(parent, 5)->layer_lengths, ElementsAre(5, 5, 0));
  EXPECT_THAT(h.TryFork(parent, 0)->layer_lengths, Each(0));
}

TEST(Fork, BadPositionsAndGoneParents) {
  Harness h;
  const std::string parent = h.Create();
  h.Mean(parent, {1, 2, 3});
  for (const int64_t length : {int64_t{-1}, int64_t{4}, int64_t{1} << 40}) {
    const absl::Status status = h.TryFork(parent, length).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(status), "BAD_POSITION");
    EXPECT_EQ(GetErrorDetails(status).metadata["length"], "3");
  }
  EXPECT_EQ(h.engine->stats().sessions_active, 1);
  EXPECT_TRUE(h.engine->CloseSession(parent).value());
  EXPECT_EQ(ReasonOf(h.TryFork(parent).status()), "CLOSED");
  EXPECT_EQ(ReasonOf(h.TryFork(std::string(32, 'a')).status()), "NEVER_EXISTED");
  EXPECT_EQ(ReasonOf(h.TryFork("a").status()), "BAD_SESSION_ID");
  EXPECT_EQ(h.observer["forked"], 0);
}

TEST(Fork, CountsAgainstTheSessionLimit) {
  EngineOptions options = Harness::DefaultOptions();
  options.max_sessions = 2;
  Harness h(options);
  const std::string parent = h.Create();
  h.Mean(parent, {1, 2, 3});
  const std::string child = h.Fork(parent);
  const absl::Status full = h.TryFork(parent).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(full), "SESSION_LIMIT");
  EXPECT_GT(GetErrorDetails(full).retry_delay, absl::ZeroDuration());
  EXPECT_EQ(h.observer["rejected SESSION_LIMIT"], 1);
  EXPECT_THAT(h.Mean(parent, {6}).out, ElementsAre(3.0f));
  EXPECT_TRUE(h.engine->CloseSession(child).value());
  EXPECT_TRUE(h.TryFork(parent).ok());
}

TEST(Fork, AnAppendWithoutRoomForItsCopyLeavesBothAsTheyWere) {
  EngineOptions options = Harness::DefaultOptions();
  options.kv_cache_bytes = 2 * kTinyBlock;
  Harness h(options);
  const std::string parent = h.Create();
  h.Mean(parent, Range(1, 100));
  const std::string child = h.Fork(parent);
  for (const std::string& id : {parent, child}) {
    const StepAnswer full = h.Mean(id, {5});
    EXPECT_EQ(full.status.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(full.reason(), "CACHE_FULL");
    EXPECT_EQ(h.Length(id), 100);
    EXPECT_EQ(h.used_bytes(), 2 * kTinyBlock);
    EXPECT_EQ(h.engine->stats().shared_bytes, 2 * kTinyBlock);
  }
  EXPECT_TRUE(h.engine->CloseSession(child).value());
  EXPECT_THAT(h.Mean(parent, {7}).out, ElementsAre(FloatEq(MeanTo(100, 7))));
}

TEST(Fork, ReservesNothingAndTakesNothingOfItsParentsReserve) {
  EngineOptions options = Harness::DefaultOptions();
  options.kv_cache_bytes = 4 * kTinyBlock;
  Harness h(options);
  SessionConfig config = TinyConfig();
  config.reserve_tokens = 192;
  const std::string parent = h.Create(config);
  h.Mean(parent, Range(1, 60));
  const absl::StatusOr<SessionInfo> child = h.TryFork(parent);
  ASSERT_TRUE(child.ok());
  EXPECT_EQ(child->config.reserve_tokens, 0);
  EXPECT_EQ(child->reserved_bytes, kTinyBlock);
  EXPECT_EQ(h.engine->GetSession(parent)->reserved_bytes, 3 * kTinyBlock);
  EXPECT_EQ(h.engine->stats().reserved_bytes, 3 * kTinyBlock);
  // The fourth block is free for the child's copy; a fifth is not.
  EXPECT_TRUE(h.Mean(child->session_id, {5}).status.ok());
  EXPECT_EQ(h.Mean(child->session_id, Range(1, 64)).reason(), "CACHE_FULL");
  // What was promised to the parent is there.
  EXPECT_THAT(h.Mean(parent, Range(61, 192)).out.back(), FloatEq(96.5f));
  EXPECT_TRUE(h.engine->CloseSession(parent).value());
  EXPECT_TRUE(h.engine->CloseSession(child->session_id).value());
  EXPECT_EQ(h.engine->stats().reserved_bytes, 0);
}

TEST(Fork, ComesBehindQueuedStepsAndBeforeLaterOnes) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.compute_hook = gate.hook();
  Harness h(options);
  const std::string parent = h.Create();
  auto first = h.Start(Harness::MeanArgs(parent, {1, 2, 3}));
  gate.AwaitArrival();
  auto second = h.Start(Harness::MeanArgs(parent, {4}));
  std::promise<absl::StatusOr<SessionInfo>> forked, lost;
  h.engine->ForkSession(parent, {}, [&](absl::StatusOr<SessionInfo> info) { forked.set_value(std::move(info)); });
  h.engine->ForkSession(parent, 5, [&](absl::StatusOr<SessionInfo> info) { lost.set_value(std::move(info)); });
  auto third = h.Start(Harness::MeanArgs(parent, {5}));
  gate.Open();
  const absl::StatusOr<SessionInfo> child = forked.get_future().get();
  ASSERT_TRUE(child.ok()) << child.status();
  EXPECT_THAT(child->layer_lengths, ElementsAre(4));
  EXPECT_EQ(ReasonOf(lost.get_future().get().status()), "BAD_POSITION") << "there were four tokens";
  EXPECT_THAT(third.get().out, ElementsAre(3.0f));
  EXPECT_THAT(h.Mean(child->session_id, {0}).out, ElementsAre(2.0f));
}

TEST(Fork, OfASessionThatIsClosedMeanwhile) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.compute_hook = gate.hook();
  Harness h(options);
  const std::string parent = h.Create();
  auto first = h.Start(Harness::MeanArgs(parent, {1, 2, 3}));
  gate.AwaitArrival();
  std::promise<absl::StatusOr<SessionInfo>> forked;
  h.engine->ForkSession(parent, {}, [&](absl::StatusOr<SessionInfo> info) { forked.set_value(std::move(info)); });
  EXPECT_TRUE(h.engine->CloseSession(parent).value());
  gate.Open();
  EXPECT_EQ(ReasonOf(forked.get_future().get().status()), "CLOSED");
  EXPECT_TRUE(first.get().status.ok());
  EXPECT_EQ(h.engine->stats().sessions_active, 0);
  // Its blocks are freed before the answer of the step that ran.
  EXPECT_EQ(h.used_bytes(), 0);
}

TEST(Fork, RefusedWhileDraining) {
  Harness h;
  const std::string parent = h.Create();
  h.Mean(parent, {1});
  EXPECT_TRUE(h.engine->Drain(absl::InfiniteFuture()));
  EXPECT_EQ(h.TryFork(parent).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(h.Reorder({parent}, {0}).status().code(), absl::StatusCode::kUnavailable);
}

// Forks of one history stepped together: a batch computes what they share once, and every answer is its own.
TEST(Fork, ManyChildrenInOneStep) {
  Harness h;
  const std::string parent = h.Create();
  h.Mean(parent, Range(1, 1000));
  StepArgs args;
  std::vector<float> expected;
  for (int i = 0; i < 16; i++) {
    StepArgs one = Harness::MeanArgs(h.Fork(parent, 1000 - 30 * i), {static_cast<float>(i)});
    args.segments.push_back(one.segments[0]);
    args.q.push_back(0), args.k.push_back(0), args.v.push_back(one.v[0]);
    expected.push_back(MeanTo(1000 - 30 * i, static_cast<float>(i)));
  }
  const StepAnswer answer = h.Step(args);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  for (int i = 0; i < 16; i++) EXPECT_NEAR(answer.out[i], expected[i], 1e-5 * expected[i]) << i;
}

}  // namespace
}  // namespace attnd

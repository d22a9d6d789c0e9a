// Reorder: sessions take each other's histories, as a beam search's rows do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>

#include "tests/unit/engine/engine_harness.h"

namespace attnd {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatEq;

constexpr int64_t kTinyBlock = 512;

std::string ReasonOf(const absl::Status& status) { return GetErrorDetails(status).reason; }

// A session of `tokens` tokens of this value.
std::string Constant(Harness* h, int64_t tokens, float value, const SessionConfig& config = TinyConfig()) {
  const std::string id = h->Create(config);
  if (tokens > 0) {
    EXPECT_TRUE(h->Mean(id, std::vector<float>(tokens, value)).status.ok());
  }
  return id;
}

// What a session holds, told by its mean: asked without a trace.
float MeanOf(Harness* h, const std::string& id) {
  StepArgs args = Harness::MeanArgs(id, {0}, h->Length(id) - 1);
  args.k.clear(), args.v.clear();
  const StepAnswer answer = h->Step(args);
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  return answer.out.empty() ? NAN : answer.out[0];
}

TEST(Reorder, PermutationsRepeatsAndThoseThatStay) {
  const std::vector<std::vector<int>> cases = {{0, 1, 2, 3}, {1, 0, 3, 2}, {3, 2, 1, 0}, {1, 2, 3, 0},
                                               {0, 0, 0, 0}, {3, 3, 1, 1}, {2, 1, 1, 3}};
  for (const std::vector<int>& sources : cases) {
    SCOPED_TRACE(testing::PrintToString(sources));
    Harness h;
    const int64_t lengths[] = {1, 64, 130, 300};
    std::vector<std::string> ids;
    for (int i = 0; i < 4; i++) ids.push_back(Constant(&h, lengths[i], static_cast<float>(i + 1)));
    const absl::StatusOr<std::vector<int64_t>> got = h.Reorder(ids, sources);
    ASSERT_TRUE(got.ok()) << got.status();
    std::array<bool, 4> kept = {};
    for (int i = 0; i < 4; i++) {
      kept[sources[i]] = true;
      EXPECT_EQ((*got)[i], lengths[sources[i]]);
      EXPECT_EQ(h.Length(ids[i]), lengths[sources[i]]);
      EXPECT_THAT(MeanOf(&h, ids[i]), FloatEq(static_cast<float>(sources[i] + 1)));
    }
    int64_t blocks = 0, shared = 0;
    for (int i = 0; i < 4; i++) {
      if (kept[i]) blocks += (lengths[i] + 63) / 64;
      if (std::count(sources.begin(), sources.end(), i) > 1) shared += (lengths[i] + 63) / 64;
    }
    EXPECT_EQ(h.used_bytes(), blocks * kTinyBlock);
    EXPECT_EQ(h.engine->stats().shared_bytes, shared * kTinyBlock);
    // Each goes its own way.
    for (int i = 0; i < 4; i++) {
      const auto n = static_cast<float>(lengths[sources[i]]), value = static_cast<float>(sources[i] + 1);
      const auto own = static_cast<float>(100 * i);
      EXPECT_THAT(h.Mean(ids[i], {own}).out, ElementsAre(FloatEq((n * value + own) / (n + 1))));
    }
    for (const std::string& id : ids) EXPECT_TRUE(h.engine->CloseSession(id).value());
    EXPECT_EQ(h.used_bytes(), 0);
    EXPECT_EQ(h.engine->stats().cache_tokens, 0);
  }
}

TEST(Reorder, OfOneRow) {
  Harness h;
  const std::string id = Constant(&h, 70, 2);
  EXPECT_THAT(h.Reorder({id}, {0}).value(), ElementsAre(70));
  EXPECT_THAT(MeanOf(&h, id), FloatEq(2));
}

TEST(Reorder, WhatCannotBeLeavesAllAsTheyWere) {
  Harness h;
  const std::string a = Constant(&h, 10, 1), b = Constant(&h, 100, 2);
  const auto refused = [&](std::vector<std::string> ids, std::vector<int> sources, absl::StatusCode code,
                           const std::string& reason) {
    const absl::Status status = h.Reorder(std::move(ids), std::move(sources)).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_EQ(ReasonOf(status), reason) << status;
    EXPECT_THAT(MeanOf(&h, a), FloatEq(1));
    EXPECT_THAT(MeanOf(&h, b), FloatEq(2));
  };
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  refused({}, {}, kInvalid, "BAD_SHAPE");
  refused({a, b}, {1}, kInvalid, "BAD_SHAPE");
  refused({a, b}, {1, 2}, kInvalid, "BAD_SHAPE");
  refused({a, b}, {1, -1}, kInvalid, "BAD_SHAPE");
  refused({a, b, a}, {1, 0, 1}, kInvalid, "DUPLICATE_SESSION");
  refused({a, b, "x"}, {1, 0, 0}, kInvalid, "BAD_SESSION_ID");
  refused({b, a, std::string(32, 'a')}, {1, 0, 0}, absl::StatusCode::kNotFound, "NEVER_EXISTED");

  SessionConfig config = TinyConfig();
  config.max_tokens = 99;
  refused({a, b, Constant(&h, 5, 3, config)}, {0, 1, 1}, absl::StatusCode::kFailedPrecondition, "TOO_LONG");
  config.max_tokens = 100;
  EXPECT_TRUE(h.Reorder({b, Constant(&h, 5, 3, config)}, {0, 0}).ok());

  const auto other = [&](auto&& change) {
    SessionConfig changed = TinyConfig();
    change(&changed);
    refused({a, b, h.Create(changed)}, {1, 0, 0}, kInvalid, "BAD_CONFIG");
  };
  other([](SessionConfig* c) { c->num_layers = 2; });
  other([](SessionConfig* c) { c->heads = {2, 1}; });
  other([](SessionConfig* c) { c->heads = {2, 2}; });
  other([](SessionConfig* c) { c->shape.head_dim = 2; });
  other([](SessionConfig* c) { c->shape.value_dim = 2; });
  other([](SessionConfig* c) { c->shape.dtype = KvDType::kBf16; });
  other([](SessionConfig* c) { c->softmax_scale = 2; });
  other([](SessionConfig* c) { c->softcap = 2; });
  other([](SessionConfig* c) { c->causal = false; });
  other([](SessionConfig* c) { c->sinks = {1}; });
  other([](SessionConfig* c) { c->alibi_slopes = {1}; });
  other([](SessionConfig* c) { c->layer_windows = {8}; });
  SessionConfig same = TinyConfig();
  same.layer_windows = {0}, same.ttl = absl::Hours(1);
  EXPECT_TRUE(h.Reorder({a, h.Create(same)}, {0, 0}).ok()) << "no window, said in another way";
}

TEST(Reorder, ComesBehindTheQueuedStepsOfAllRows) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.compute_hook = gate.hook();
  Harness h(options);
  gate.Open();
  const std::string a = Constant(&h, 1, 1), b = Constant(&h, 2, 2), c = Constant(&h, 3, 3);
  gate.Close();
  auto first = h.Start(Harness::MeanArgs(b, {2}));
  gate.AwaitArrival(4);
  auto second = h.Start(Harness::MeanArgs(c, {3, 3}));
  std::promise<absl::StatusOr<std::vector<int64_t>>> done;
  h.engine->ReorderSessions({a, b, c}, {2, 0, 1},
                            [&](absl::StatusOr<std::vector<int64_t>> lengths) { done.set_value(std::move(lengths)); });
  auto third = h.Start(Harness::MeanArgs(a, {3}));  // of the history that it takes
  gate.Open();
  EXPECT_THAT(done.get_future().get().value(), ElementsAre(5, 1, 3));
  EXPECT_EQ(third.get().segments[0].length, 6);
  EXPECT_THAT(MeanOf(&h, a), FloatEq(3));
  EXPECT_THAT(MeanOf(&h, b), FloatEq(1));
  EXPECT_THAT(MeanOf(&h, c), FloatEq(2));
}

TEST(Reorder, WithARowThatIsClosedMeanwhileChangesNothing) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.compute_hook = gate.hook();
  Harness h(options);
  gate.Open();
  const std::string a = Constant(&h, 1, 1), b = Constant(&h, 2, 2), c = Constant(&h, 3, 3);
  gate.Close();
  auto first = h.Start(Harness::MeanArgs(b, {2}));
  gate.AwaitArrival(4);
  std::promise<absl::StatusOr<std::vector<int64_t>>> done;
  h.engine->ReorderSessions({a, b, c}, {1, 0, 1},
                            [&](absl::StatusOr<std::vector<int64_t>> lengths) { done.set_value(std::move(lengths)); });
  EXPECT_TRUE(h.engine->CloseSession(c).value());
  gate.Open();
  EXPECT_EQ(ReasonOf(done.get_future().get().status()), "CLOSED");
  EXPECT_THAT(MeanOf(&h, a), FloatEq(1));
  EXPECT_THAT(MeanOf(&h, b), FloatEq(2));
  EXPECT_EQ(h.used_bytes(), 2 * kTinyBlock);
}

// A row with a reserve goes on having what others do not keep of it.
TEST(Reorder, OfRowsWithAReserve) {
  EngineOptions options = Harness::DefaultOptions();
  options.kv_cache_bytes = 8 * kTinyBlock;
  Harness h(options);
  SessionConfig config = TinyConfig();
  config.reserve_tokens = 192;
  const std::string a = Constant(&h, 64, 1, config), b = Constant(&h, 128, 2);
  EXPECT_EQ(h.engine->stats().reserved_bytes, 5 * kTinyBlock);
  ASSERT_TRUE(h.Reorder({a, b}, {1, 1}).ok());  // a's block is free, b's two fill two places of a's three
  EXPECT_EQ(h.used_bytes(), 2 * kTinyBlock);
  EXPECT_EQ(h.engine->GetSession(a)->reserved_bytes, 3 * kTinyBlock);
  EXPECT_EQ(h.engine->stats().reserved_bytes, 3 * kTinyBlock);
  ASSERT_TRUE(h.Mean(a, std::vector<float>(64, 2)).status.ok());
  ASSERT_TRUE(h.Reorder({a, b}, {1, 0}).ok());  // b keeps all of a's three: nothing of the reserve is left to come
  EXPECT_EQ(h.used_bytes(), 3 * kTinyBlock);
  for (const std::string& id : {a, b}) EXPECT_TRUE(h.engine->CloseSession(id).value());
  EXPECT_EQ(h.engine->stats().reserved_bytes, 0);
}

constexpr HeadCounts kHeads = {4, 2};
constexpr int kDim = 24, kLayers = 2;

struct Token {
  std::vector<float> q, k, v;
};

Token MakeToken(uint64_t seed) {
  return {RandomFloats(3 * seed, kHeads.num_q_heads * kDim), RandomFloats(3 * seed + 1, kHeads.num_kv_heads * kDim),
          RandomFloats(3 * seed + 2, kHeads.num_kv_heads * kDim)};
}

StepArgs TokenArgs(int layer) {
  StepArgs args;
  args.layer = layer;
  return args;
}

void AddToken(const Token& token, StepArgs* args) {
  args->q.insert(args->q.end(), token.q.begin(), token.q.end());
  args->k.insert(args->k.end(), token.k.begin(), token.k.end());
  args->v.insert(args->v.end(), token.v.begin(), token.v.end());
}

StepSegment SegmentOf(const std::string& id, int64_t tokens) {
  StepSegment segment;
  segment.session_id = id;
  segment.num_tokens = tokens;
  return segment;
}

// 4 beams for 200 steps. Each row's answers are those of a session that was given the row's history in one prefill.
TEST(Reorder, BeamSearchOf200StepsIsThatOfSessionsFilledAnew) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  constexpr int kRows = 4, kSteps = kThreadSanitizer ? 40 : 200, kPrompt = 50;
  Harness h;
  SessionConfig config = TinyConfig();
  config.num_layers = kLayers;
  config.heads = kHeads;
  config.shape = {kDim, kDim, KvDType::kBf16};
  config.softmax_scale = 0.2f;
  config.layer_windows = {0, 40};
  std::vector<Token> tokens;
  std::vector<std::vector<int>> histories(kRows);
  std::vector<std::string> ids = {h.Create(config)};
  for (int layer = 0; layer < kLayers; layer++) {
    StepArgs args = TokenArgs(layer);
    args.segments = {SegmentOf(ids[0], kPrompt)};
    for (int i = 0; i < kPrompt; i++) {
      if (layer == 0) tokens.push_back(MakeToken(seed + i)), histories[0].push_back(i);
      AddToken(tokens[i], &args);
    }
    ASSERT_TRUE(h.Step(args).status.ok());
  }
  for (int row = 1; row < kRows; row++) ids.push_back(h.Fork(ids[0])), histories[row] = histories[0];
  for (int step = 0; step < kSteps; step++) {
    std::vector<int> sources(kRows);
    for (int& source : sources) source = static_cast<int>(random() % kRows);
    ASSERT_TRUE(h.Reorder(ids, sources).ok());
    const std::vector<std::vector<int>> before = histories;
    for (int row = 0; row < kRows; row++) {
      histories[row] = before[sources[row]];
      histories[row].push_back(static_cast<int>(tokens.size()));
      tokens.push_back(MakeToken(seed + tokens.size()));
    }
    for (int layer = 0; layer < kLayers; layer++) {
      StepArgs args = TokenArgs(layer);
      for (int row = 0; row < kRows; row++) {
        args.segments.push_back(SegmentOf(ids[row], 1));
        AddToken(tokens[histories[row].back()], &args);
      }
      const StepAnswer answer = h.Step(args);
      ASSERT_TRUE(answer.status.ok()) << answer.status;
      if (step % 10 != 0 && step < kSteps - 3) continue;
      for (int row = 0; row < kRows; row++) {
        const std::string twin = h.Create(config);
        StepArgs all = TokenArgs(layer);
        all.segments = {SegmentOf(twin, static_cast<int64_t>(histories[row].size()))};
        for (const int t : histories[row]) AddToken(tokens[t], &all);
        const StepAnswer expected = h.Step(all);
        ASSERT_TRUE(expected.status.ok()) << expected.status;
        const size_t floats = kHeads.num_q_heads * kDim;
        EXPECT_TRUE(SameBits({expected.out.end() - floats, expected.out.end()},
                             {answer.out.begin() + row * floats, answer.out.begin() + (row + 1) * floats}))
            << "step " << step << ", layer " << layer << ", row " << row;
        EXPECT_TRUE(h.engine->CloseSession(twin).value());
      }
    }
  }
  for (const std::string& id : ids) EXPECT_TRUE(h.engine->CloseSession(id).value());
  EXPECT_EQ(h.used_bytes(), 0);
  EXPECT_EQ(h.engine->stats().shared_bytes, 0);
}

}  // namespace
}  // namespace attnd

// Layers with a window keep what a coming row may see and free the rest (scenario K13's windows, over long sessions).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/unit/engine/engine_harness.h"

namespace attnd {
namespace {

using ::testing::ElementsAre;

constexpr HeadCounts kHeads = {4, 2};
constexpr int kHeadDim = 24, kValueDim = 40;
constexpr int64_t kBlock = 64;
constexpr int64_t kTokens = kThreadSanitizer ? 200 : 700;

std::string ReasonOf(const absl::Status& status) { return GetErrorDetails(status).reason; }

SessionConfig Config(int64_t window) {
  SessionConfig config = TinyConfig();
  config.heads = kHeads;
  config.shape = {kHeadDim, kValueDim, KvDType::kF32};
  config.softmax_scale = 0.3f;
  config.layer_windows = {window};
  return config;
}

struct Sequence {
  std::vector<float> q = RandomFloats(11, kTokens* kHeads.num_q_heads* kHeadDim);
  std::vector<float> k = RandomFloats(12, kTokens* kHeads.num_kv_heads* kHeadDim);
  std::vector<float> v = RandomFloats(13, kTokens* kHeads.num_kv_heads* kValueDim);
};

const Sequence& TheSequence() {
  static const Sequence& sequence = *new Sequence;
  return sequence;
}

StepArgs Args(const std::string& id, int64_t begin, int64_t end, std::optional<int64_t> start = {},
              bool rewind = false) {
  const auto rows = [&](const std::vector<float>& tensor, int64_t row) {
    return std::vector<float>(tensor.begin() + begin * row, tensor.begin() + end * row);
  };
  StepArgs args;
  args.segments.resize(1);
  args.segments[0].session_id = id;
  args.segments[0].num_tokens = end - begin;
  args.segments[0].start_position = start;
  args.segments[0].rewind = rewind;
  args.q = rows(TheSequence().q, kHeads.num_q_heads * kHeadDim);
  args.k = rows(TheSequence().k, kHeads.num_kv_heads * kHeadDim);
  args.v = rows(TheSequence().v, kHeads.num_kv_heads * kValueDim);
  return args;
}

StepArgs AttendArgs(const std::string& id, int64_t begin, int64_t end) {
  StepArgs args = Args(id, begin, end, begin);
  args.k.clear(), args.v.clear();
  return args;
}

// What one prefill of everything answers: nothing is freed during it.
std::vector<float> Whole(int64_t window, bool causal = true) {
  Harness h;
  SessionConfig config = Config(window);
  config.causal = causal;
  const std::string id = h.Create(config);
  const StepAnswer answer = h.Step(Args(id, 0, kTokens));
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_THAT(h.engine->GetSession(id)->layer_first_tokens, ElementsAre(0));
  return answer.out;
}

std::vector<float> Rows(const std::vector<float>& out, int64_t begin, int64_t end) {
  constexpr int64_t kRow = kHeads.num_q_heads * kValueDim;
  return {out.begin() + begin * kRow, out.begin() + end * kRow};
}

int64_t FirstHeld(int64_t window, int64_t step_start) {
  return std::max<int64_t>(0, step_start - window + 1) / kBlock * kBlock;
}

struct WindowTest : testing::TestWithParam<int64_t> {
  int64_t window() const { return GetParam(); }
};

TEST_P(WindowTest, DecodesKeepTheWindowAndItsBits) {
  const std::vector<float> whole = Whole(window());
  Harness h;
  const std::string id = h.Create(Config(window()));
  ASSERT_TRUE(h.Step(Args(id, 0, 1)).status.ok());
  const int64_t block_bytes = h.used_bytes() / kHeads.num_kv_heads;
  for (int64_t t = 1; t < kTokens; t++) {
    const StepAnswer answer = h.Step(Args(id, t, t + 1));
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    ASSERT_TRUE(SameBits(answer.out, Rows(whole, t, t + 1))) << t;
    const SessionInfo info = h.engine->GetSession(id).value();
    ASSERT_EQ(info.layer_lengths[0], t + 1);
    ASSERT_EQ(info.layer_first_tokens[0], FirstHeld(window(), t));
    const int64_t blocks = (t + 1 + kBlock - 1) / kBlock - FirstHeld(window(), t) / kBlock;
    ASSERT_EQ(info.used_bytes, blocks * kHeads.num_kv_heads * block_bytes);
    ASSERT_LE(blocks, (window() + kBlock - 1) / kBlock + 1);
    ASSERT_EQ(h.used_bytes(), info.used_bytes);
    if (t % 7 == 0) {  // a replay of the last step
      const StepAnswer again = h.Step(Args(id, t, t + 1, t));
      ASSERT_TRUE(SameBits(again.out, answer.out)) << t << " " << again.status;
    }
  }
  EXPECT_TRUE(h.engine->CloseSession(id).value());
  EXPECT_EQ(h.used_bytes(), 0);
}

TEST_P(WindowTest, StepsOfManySizesKeepTheBits) {
  const std::vector<float> whole = Whole(window());
  EngineOptions options = Harness::DefaultOptions();
  options.prefill_chunk_tokens = 64;
  Harness h(options);
  const std::string id = h.Create(Config(window()));
  const int64_t sizes[] = {63, 2, 64, 65, 1, 130, 9};
  for (int64_t begin = 0, i = 0; begin < kTokens; i++) {
    const int64_t end = std::min(kTokens, begin + sizes[i % 7]);
    const StepAnswer answer = h.Step(Args(id, begin, end));
    ASSERT_TRUE(SameBits(answer.out, Rows(whole, begin, end))) << begin << " " << answer.status;
    ASSERT_TRUE(SameBits(h.Step(Args(id, begin, end, begin)).out, answer.out)) << "replay at " << begin;
    ASSERT_TRUE(SameBits(h.Step(AttendArgs(id, begin, end)).out, answer.out)) << "asked again at " << begin;
    ASSERT_EQ(h.engine->GetSession(id)->layer_first_tokens[0], FirstHeld(window(), begin));
    begin = end;
  }
}

// The first position that sees nothing freed, and the last one that does.
TEST_P(WindowTest, GoingBackAsFarAsTokensAreHeldAndNoFurther) {
  const std::vector<float> whole = Whole(window());
  const auto is_freed = [](const absl::Status& status, int64_t first) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_EQ(ReasonOf(status), "TOKENS_FREED") << status;
    EXPECT_EQ(GetErrorDetails(status).metadata["first_token"], std::to_string(first));
  };
  for (const int64_t length : {int64_t{190}, kTokens}) {
    Harness h;
    const std::string id = h.Create(Config(window()));
    const auto fill = [&] {
      ASSERT_TRUE(h.Step(Args(id, 0, length - 1, 0, true)).status.ok());
      ASSERT_TRUE(h.Step(Args(id, length - 1, length)).status.ok());
    };
    ASSERT_NO_FATAL_FAILURE(fill());
    const int64_t first = h.engine->GetSession(id)->layer_first_tokens[0];
    ASSERT_EQ(first, FirstHeld(window(), length - 1));
    if (first == 0) continue;
    const int64_t edge = first + window() - 1;
    ASSERT_LT(edge, length);
    const int64_t used = h.used_bytes();
    is_freed(h.Step(AttendArgs(id, edge - 1, length)).status, first);
    is_freed(h.Step(AttendArgs(id, 0, 1)).status, first);
    is_freed(h.Step(Args(id, edge - 1, length, edge - 1)).status, first);
    is_freed(h.Step(Args(id, edge - 1, edge, edge - 1, true)).status, first);
    is_freed(h.Rewind(id, edge - 1).status(), first);
    is_freed(h.TryFork(id, edge - 1).status(), first);
    EXPECT_EQ(h.used_bytes(), used);
    EXPECT_EQ(h.Length(id), length);
    EXPECT_EQ(h.engine->stats().sessions_active, 1);

    EXPECT_TRUE(SameBits(h.Step(AttendArgs(id, edge, length)).out, Rows(whole, edge, length)));
    const std::string child = h.Fork(id, edge);
    EXPECT_EQ(h.engine->GetSession(child)->layer_first_tokens[0], first);
    EXPECT_TRUE(SameBits(h.Step(Args(child, edge, length)).out, Rows(whole, edge, length)));
    EXPECT_TRUE(SameBits(h.Step(Args(id, edge, length, edge)).out, Rows(whole, edge, length))) << "a replay";
    ASSERT_NO_FATAL_FAILURE(fill());
    EXPECT_TRUE(SameBits(h.Step(Args(id, edge, edge + 1, edge, true)).out, Rows(whole, edge, edge + 1)));
    ASSERT_NO_FATAL_FAILURE(fill());
    ASSERT_TRUE(h.Rewind(id, edge).ok());
    EXPECT_TRUE(SameBits(h.Step(Args(id, edge, length)).out, Rows(whole, edge, length)));
    for (const std::string& one : {id, child}) EXPECT_TRUE(h.engine->CloseSession(one).value());
    EXPECT_EQ(h.used_bytes(), 0);
    EXPECT_EQ(h.engine->stats().shared_bytes, 0);
  }
}

TEST_P(WindowTest, FromTheBeginningIsAlwaysAllowed) {
  const std::vector<float> whole = Whole(window());
  Harness h;
  const std::string id = h.Create(Config(window()));
  const auto fill = [&] {
    for (int64_t t = h.Length(id); t < 190; t++) ASSERT_TRUE(h.Step(Args(id, t, t + 1)).status.ok());
  };
  const auto expect_begun_anew = [&](const std::vector<float>& out) {
    EXPECT_TRUE(SameBits(out, Rows(whole, 0, 190)));
    EXPECT_EQ(h.engine->GetSession(id)->layer_first_tokens[0], 0);
    ASSERT_TRUE(h.Rewind(id, 100).ok()) << "all is held";
  };
  fill();
  expect_begun_anew(h.Step(Args(id, 0, 190, 0)).out);  // a replay of everything
  fill();
  expect_begun_anew(h.Step(Args(id, 0, 190, 0, true)).out);
  fill();
  EXPECT_THAT(h.TryFork(id, 0)->layer_first_tokens, ElementsAre(0));
  ASSERT_TRUE(h.Rewind(id, 0).ok());
  EXPECT_EQ(h.used_bytes(), 0);
  expect_begun_anew(h.Step(Args(id, 0, 190)).out);
}

TEST_P(WindowTest, NotCausal) {
  const std::vector<float> whole = Whole(window(), false);
  Harness h;
  SessionConfig config = Config(window());
  config.causal = false;
  const std::string id = h.Create(config);
  ASSERT_TRUE(h.Step(Args(id, 0, kTokens - 1)).status.ok());
  const StepAnswer last = h.Step(Args(id, kTokens - 1, kTokens));
  EXPECT_TRUE(SameBits(last.out, Rows(whole, kTokens - 1, kTokens)));
  const int64_t edge = FirstHeld(window(), kTokens - 1) + window() - 1;
  if (edge < kTokens) {
    EXPECT_TRUE(SameBits(h.Step(AttendArgs(id, edge, kTokens)).out, Rows(whole, edge, kTokens)));
  }
}

INSTANTIATE_TEST_SUITE_P(Windows, WindowTest, testing::Values(1, 2, 17, 63, 64, 65, 128, 150, 1000));

TEST(Window, ADecodeOfAnyLengthRunsInAFewBlocks) {
  EngineOptions options = Harness::DefaultOptions();
  options.kv_cache_bytes = 3 * 512;
  Harness h(options);
  SessionConfig config = TinyConfig();
  config.layer_windows = {100};
  const std::string id = h.Create(config);
  const int tokens = kThreadSanitizer ? 500 : 5000;
  for (int t = 0; t < tokens; t++) {
    const StepAnswer answer = h.Mean(id, {static_cast<float>(t % 100)});
    ASSERT_TRUE(answer.status.ok()) << t << " " << answer.status;
    if (t >= 99) {
      ASSERT_FLOAT_EQ(answer.out[0], 49.5f) << t;
    }
  }
}

// Only the layers with a window hold a session back, and only where they are cut.
TEST(Window, LayersOfEachKind) {
  Harness h;
  SessionConfig config = TinyConfig();
  config.num_layers = 2;
  config.layer_windows = {0, 10};
  const std::string id = h.Create(config);
  for (int t = 0; t < 200; t++) {
    for (int layer = 0; layer < 2; layer++) {
      if (layer == 1 && t >= 150) continue;
      StepArgs args = Harness::MeanArgs(id, {1});
      args.layer = layer;
      ASSERT_TRUE(h.Step(args).status.ok());
    }
  }
  EXPECT_THAT(h.engine->GetSession(id)->layer_first_tokens, ElementsAre(0, 128));
  EXPECT_EQ(ReasonOf(h.Rewind(id, 136).status()), "TOKENS_FREED");
  EXPECT_EQ(h.Length(id), 200) << "nothing was cut";
  EXPECT_THAT(h.Rewind(id, 160)->layer_lengths, ElementsAre(160, 150));
  EXPECT_THAT(h.Rewind(id, 137)->layer_lengths, ElementsAre(137, 137));
  EXPECT_THAT(h.TryFork(id)->layer_first_tokens, ElementsAre(0, 128));
}

}  // namespace
}  // namespace attnd

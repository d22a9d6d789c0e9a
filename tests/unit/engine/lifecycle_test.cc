// Life of sessions: ids, positions, atomic appends, closing (scenarios S01 to S12, S21, C01, C06, D05, K09).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <set>

#include "tests/unit/engine/engine_harness.h"

namespace attnd {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr const char kUnknownId[] = "0123456789abcdef0123456789abcdef";
// Bytes of one block of the tiny shape: 64 tokens of K and V, one float each.
constexpr int64_t kTinyBlock = 512;

std::vector<float> Range(int first, int last) {
  std::vector<float> out;
  for (int i = first; i <= last; i++) out.push_back(static_cast<float>(i));
  return out;
}

TEST(Lifecycle, S01UnknownClosedAndMalformedIds) {
  Harness h;
  EXPECT_EQ(h.Mean(kUnknownId, {1}).reason(), "NEVER_EXISTED");
  EXPECT_EQ(h.Mean(kUnknownId, {1}).status.code(), absl::StatusCode::kNotFound);
  for (const std::string& id : {std::string(), std::string(10240, 'a'), std::string("a\n\"b"), std::string(32, 'G'),
                                std::string(31, 'a'), std::string(33, 'a'), std::string(32, '\0')}) {
    EXPECT_EQ(h.Mean(id, {1}).status.code(), absl::StatusCode::kInvalidArgument) << id.size();
    EXPECT_EQ(h.Mean(id, {1}).reason(), "BAD_SESSION_ID");
    EXPECT_EQ(h.engine->GetSession(id).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(h.engine->CloseSession(id).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(h.Rewind(id, 0).status().code(), absl::StatusCode::kInvalidArgument);
  }
  const std::string id = h.Create();
  EXPECT_THAT(h.Mean(id, {1}).out, ElementsAre(1));
  EXPECT_THAT(h.engine->CloseSession(id).value(), true);
  EXPECT_EQ(h.Mean(id, {1}).reason(), "CLOSED");
  EXPECT_EQ(GetErrorDetails(h.engine->GetSession(id).status()).reason, "CLOSED");
  EXPECT_EQ(GetErrorDetails(h.Rewind(id, 0).status()).reason, "CLOSED");
  EXPECT_EQ(h.engine->CloseSession(id).value(), false);
  EXPECT_EQ(h.engine->CloseSession(kUnknownId).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(h.used_bytes(), 0);
  EXPECT_EQ(h.engine->stats().sessions_active, 0);
}

TEST(Lifecycle, IdsAreAllDifferent) {
  Harness h;
  std::set<std::string> ids;
  for (int i = 0; i < 1000; i++) EXPECT_TRUE(ids.insert(h.Create()).second);
}

TEST(Lifecycle, SessionLimit) {
  EngineOptions options = Harness::DefaultOptions();
  options.max_sessions = 3;
  Harness h(options);
  std::vector<std::string> ids;
  for (int i = 0; i < 3; i++) ids.push_back(h.Create());
  const absl::Status full = h.TryCreate(TinyConfig()).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetErrorDetails(full).reason, "SESSION_LIMIT");
  EXPECT_GT(GetErrorDetails(full).retry_delay, absl::ZeroDuration());
  EXPECT_TRUE(h.engine->CloseSession(ids[0]).value());
  EXPECT_TRUE(h.TryCreate(TinyConfig()).ok());
  EXPECT_EQ(h.observer["rejected SESSION_LIMIT"], 1);
}

TEST(Lifecycle, K12BadConfigsCreateNothing) {
  Harness h;
  const auto refuse = [&](auto&& change, const std::string& part) {
    SessionConfig config = TinyConfig();
    change(&config);
    const absl::Status status = h.TryCreate(config).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << part;
    EXPECT_EQ(GetErrorDetails(status).reason, "BAD_CONFIG") << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  };
  refuse([](SessionConfig* c) { c->heads = {6, 4}; }, "num_q_heads (6) must be a multiple of num_kv_heads (4)");
  refuse([](SessionConfig* c) { c->heads = {2, 4}; }, "(2)");
  refuse([](SessionConfig* c) { c->heads = {2, 0}; }, "(0)");
  refuse([](SessionConfig* c) { c->heads = {-2, -1}; }, "(-2)");
  refuse([](SessionConfig* c) { c->heads = {2147483647, 1}; }, "2147483647");
  refuse([](SessionConfig* c) { c->num_layers = 0; }, "num_layers");
  refuse([](SessionConfig* c) { c->num_layers = 1025; }, "1025");
  refuse([](SessionConfig* c) { c->shape.head_dim = 257; }, "257");
  refuse([](SessionConfig* c) { c->shape.value_dim = 0; }, "value_dim");
  refuse([](SessionConfig* c) { c->shape.dtype = static_cast<KvDType>(17); }, "kv_dtype 17");
  refuse([](SessionConfig* c) { c->softmax_scale = kNan; }, "softmax_scale");
  refuse([](SessionConfig* c) { c->softcap = -1; }, "softcap");
  refuse([](SessionConfig* c) { c->layer_windows = {1, 1}; }, "layer_windows");
  refuse([](SessionConfig* c) { c->layer_windows = {-1}; }, "window");
  refuse([](SessionConfig* c) { c->alibi_slopes = {1, 1}; }, "alibi_slopes");
  refuse([](SessionConfig* c) { c->sinks = {INFINITY}; }, "sinks");
  refuse([](SessionConfig* c) { c->max_tokens = int64_t{1} << 40; }, "max_tokens");
  refuse([](SessionConfig* c) { c->max_tokens = 5, c->reserve_tokens = 6; }, "reserve_tokens");
  refuse([](SessionConfig* c) { c->reserve_tokens = -1; }, "reserve_tokens");
  EXPECT_EQ(h.engine->stats().sessions_active, 0);
  EXPECT_EQ(h.observer["created"], 0);
}

TEST(Lifecycle, S08FailedStepsLeaveNoTrace) {
  Harness h;
  const std::string id = h.Create();
  EXPECT_THAT(h.Mean(id, {1, 2, 3}).out, ElementsAre(1, 1.5, 2));
  const int64_t used = h.used_bytes();
  const StepAnswer bad = h.Mean(id, {50, 50, kNan, 50});
  EXPECT_EQ(bad.reason(), "NOT_FINITE");
  EXPECT_THAT(std::string(bad.status.message()), HasSubstr("v row 2, head 0, element 0"));
  EXPECT_THAT(bad.out, ElementsAre(0, 0, 0, 0));
  for (const float value : {kNan, INFINITY, -INFINITY}) {
    for (int tensor = 0; tensor < 3; tensor++) {
      StepArgs args = Harness::MeanArgs(id, {50, 50});
      (tensor == 0 ? args.q : tensor == 1 ? args.k : args.v)[1] = value;
      EXPECT_EQ(h.Step(args).reason(), "NOT_FINITE");
    }
  }
  StepArgs wrong = Harness::MeanArgs(id, {50, 50});
  wrong.v.push_back(1);
  EXPECT_EQ(h.Step(wrong).reason(), "BAD_SHAPE");
  StepArgs late = Harness::MeanArgs(id, {50});
  late.deadline = absl::Now() - absl::Seconds(1);
  EXPECT_EQ(h.Step(late).status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(h.Length(id), 3);
  EXPECT_EQ(h.used_bytes(), used);
  EXPECT_THAT(h.Mean(id, {6}).out, ElementsAre(3));
}

// A bad number in the last row of a prefill of many chunks: told at once, nothing kept.
TEST(Lifecycle, S08LongPrefillWithABadLastRow) {
  EngineOptions options = Harness::DefaultOptions();
  options.prefill_chunk_tokens = 64;
  Harness h(options);
  const std::string id = h.Create();
  EXPECT_TRUE(h.Mean(id, {1, 2, 3}).status.ok());
  const int64_t used = h.used_bytes();
  std::vector<float> v(1000, 50);
  v.back() = kNan;
  const int64_t batches = h.observer["batch"];
  EXPECT_EQ(h.Mean(id, v).reason(), "NOT_FINITE");
  EXPECT_EQ(h.observer["batch"], batches + 1);
  EXPECT_EQ(h.used_bytes(), used);
  EXPECT_THAT(h.Mean(id, {6}).out, ElementsAre(3));
}

TEST(Lifecycle, S08InjectedComputeFailure) {
  EngineOptions options = Harness::DefaultOptions();
  std::atomic<bool> fail{false};
  options.compute_hook = [&] { return fail ? absl::InternalError("injected") : absl::OkStatus(); };
  options.prefill_chunk_tokens = 64;
  Harness h(options);
  const std::string id = h.Create();
  EXPECT_TRUE(h.Mean(id, {1, 2, 3}).status.ok());
  const int64_t used = h.used_bytes();
  fail = true;
  EXPECT_EQ(h.Mean(id, {50}).status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(h.Mean(id, std::vector<float>(500, 50)).status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(h.Mean(id, {50, 50}, 1).status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(h.Mean(id, {50}, 0, true).status.code(), absl::StatusCode::kInternal);
  fail = false;
  EXPECT_EQ(h.used_bytes(), used);
  EXPECT_THAT(h.Mean(id, {6}).out, ElementsAre(3));
}

TEST(Lifecycle, ScoresBeyondFloatAreRefused) {
  Harness h;
  const std::string id = h.Create();
  EXPECT_TRUE(h.Mean(id, {1, 2, 3}).status.ok());
  StepArgs args = Harness::MeanArgs(id, {50});
  args.q = {3e38f};
  args.k = {3e38f};
  EXPECT_EQ(h.Step(args).reason(), "SCORE_OVERFLOW");
  EXPECT_THAT(h.Mean(id, {6}).out, ElementsAre(3));
}

// Finite floats that are no finite bfloat16, or float16.
TEST(Lifecycle, ValuesBeyondTheCachesTypeAreRefused) {
  Harness h;
  for (const auto& [dtype, fits, beyond] :
       {std::tuple{KvDType::kBf16, 3.38e38f, 3.4e38f}, {KvDType::kF16, 65519.9f, -65520.0f}}) {
    SessionConfig config = TinyConfig();
    config.shape.dtype = dtype;
    const std::string id = h.Create(config);
    EXPECT_THAT(h.Mean(id, {1, 2, 3}).out, ElementsAre(1, 1.5, 2));
    const StepAnswer answer = h.Mean(id, {1, beyond});
    EXPECT_EQ(answer.reason(), "NOT_FINITE");
    EXPECT_THAT(std::string(answer.status.message()), HasSubstr("v row 1, head 0, element 0 is beyond the range"));
    EXPECT_THAT(h.Mean(id, {6}).out, ElementsAre(3));
    EXPECT_TRUE(h.Mean(h.Create(config), {fits}).status.ok());
    // Q is rounded for bfloat16 only.
    StepArgs args = Harness::MeanArgs(h.Create(config), {5});
    args.q = {beyond};
    EXPECT_EQ(h.Step(args).reason(), dtype == KvDType::kBf16 ? "NOT_FINITE" : "");
  }
  SessionConfig config = TinyConfig();
  config.shape.dtype = KvDType::kInt8;  // its scales are floats
  EXPECT_THAT(h.Mean(h.Create(config), {3e38f}).out, ElementsAre(testing::FloatNear(3e38f, 1e32f)));
}

TEST(Lifecycle, S09ARetryIsAReplay) {
  Harness h;
  const std::string id = h.Create();
  EXPECT_TRUE(h.Mean(id, {1, 2, 3}).status.ok());
  EXPECT_THAT(h.Mean(id, {10}, 3).out, ElementsAre(4));
  const StepAnswer again = h.Mean(id, {10}, 3);
  EXPECT_THAT(again.out, ElementsAre(4));
  EXPECT_EQ(again.segments[0].start_position, 3);
  EXPECT_EQ(again.segments[0].length, 4);
  EXPECT_THAT(h.Mean(id, {2, 3, 10}, 1).out, ElementsAre(1.5, 2, 4));
  EXPECT_THAT(h.Mean(id, {1, 2, 3, 10}, 0).out, ElementsAre(1, 1.5, 2, 4));
  EXPECT_EQ(h.Length(id), 4);
}

TEST(Lifecycle, PositionsThatFitNowhere) {
  Harness h;
  const std::string id = h.Create();
  EXPECT_TRUE(h.Mean(id, {1, 2, 3}).status.ok());
  for (const auto& [start, tokens] : std::vector<std::pair<int64_t, int>>{{-1, 1},
                                                                          {-1, 4},
                                                                          {0, 1},
                                                                          {0, 2},
                                                                          {0, 4},
                                                                          {1, 1},
                                                                          {2, 2},
                                                                          {4, 1},
                                                                          {1 << 30, 1},
                                                                          {INT64_MAX, 1},
                                                                          {INT64_MIN, 1}}) {
    const StepAnswer answer = h.Mean(id, std::vector<float>(tokens, 50), start);
    EXPECT_EQ(answer.status.code(), absl::StatusCode::kFailedPrecondition) << start << " " << tokens;
    EXPECT_EQ(answer.reason(), "BAD_POSITION");
    EXPECT_EQ(answer.metadata("length"), "3");
  }
  EXPECT_EQ(h.Mean(id, {50}, 4, true).reason(), "BAD_POSITION");
  EXPECT_EQ(h.Mean(id, {50}, -1, true).reason(), "BAD_POSITION");
  EXPECT_THAT(h.Mean(id, {6}).out, ElementsAre(3));
}

TEST(Lifecycle, S12RewindAtEveryCut) {
  for (const int length : {6, 63, 64, 65, 130}) {
    Harness h;
    for (int cut = 0; cut <= length; cut += length > 10 ? 7 : 1) {
      float sum = 0;
      for (int i = 1; i <= cut; i++) sum += static_cast<float>(i);
      const std::string by_step = h.Create(), by_call = h.Create();
      EXPECT_TRUE(h.Mean(by_step, Range(1, length)).status.ok());
      EXPECT_TRUE(h.Mean(by_call, Range(1, length)).status.ok());
      const absl::StatusOr<SessionInfo> info = h.Rewind(by_call, cut);
      ASSERT_TRUE(info.ok()) << info.status();
      EXPECT_EQ(info->layer_lengths[0], cut);
      const float expected = (sum + 9) / static_cast<float>(cut + 1);
      EXPECT_THAT(h.Mean(by_step, {9}, cut, true).out, ElementsAre(FloatEq(expected))) << length << " " << cut;
      EXPECT_THAT(h.Mean(by_call, {9}).out, ElementsAre(FloatEq(expected))) << length << " " << cut;
      EXPECT_EQ(h.Length(by_step), cut + 1);
      EXPECT_EQ(h.engine->GetSession(by_step)->used_bytes, (cut / 64 + 1) * kTinyBlock);
      EXPECT_EQ(h.engine->GetSession(by_call)->used_bytes, (cut / 64 + 1) * kTinyBlock);
    }
    const std::string id = h.Create();
    EXPECT_TRUE(h.Mean(id, Range(1, length)).status.ok());
    EXPECT_EQ(h.Rewind(id, length + 1).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(h.Rewind(id, -1).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(h.Length(id), length);
  }
}

TEST(Lifecycle, LayersHaveLengthsOfTheirOwn) {
  Harness h;
  SessionConfig config = TinyConfig();
  config.num_layers = 3;
  const std::string id = h.Create(config);
  for (int layer = 0; layer < 3; layer++) {
    StepArgs args = Harness::MeanArgs(id, std::vector<float>(10 * (layer + 1), static_cast<float>(layer)));
    args.layer = layer;
    EXPECT_EQ(h.Step(args).segments[0].length, 10 * (layer + 1));
  }
  EXPECT_THAT(h.engine->GetSession(id)->layer_lengths, ElementsAre(10, 20, 30));
  EXPECT_THAT(h.Rewind(id, 15)->layer_lengths, ElementsAre(10, 15, 15));
  for (const int layer : {-1, 3, 1 << 30}) {
    StepArgs args = Harness::MeanArgs(id, {1});
    args.layer = layer;
    EXPECT_EQ(h.Step(args).reason(), "BAD_SHAPE");
  }
}

TEST(Lifecycle, AppendOnlyAndAttendOnly) {
  Harness h;
  const std::string id = h.Create();
  StepArgs append = Harness::MeanArgs(id, {1, 2, 3});
  append.q.clear();
  StepAnswer answer = h.Step(append);
  EXPECT_TRUE(answer.status.ok());
  EXPECT_TRUE(answer.out.empty());
  EXPECT_EQ(answer.segments[0].length, 3);
  const auto attend = [&](int64_t tokens, std::optional<int64_t> start) {
    StepArgs args = Harness::MeanArgs(id, std::vector<float>(tokens, 0), start);
    args.k.clear();
    args.v.clear();
    return h.Step(args);
  };
  EXPECT_THAT(attend(2, {}).out, ElementsAre(1.5, 2));
  EXPECT_THAT(attend(2, 0).out, ElementsAre(1, 1.5));
  EXPECT_THAT(attend(2, 2).out, ElementsAre(2, 2));  // position 3 was not appended yet
  EXPECT_EQ(attend(2, 2).segments[0].length, 3);
  EXPECT_EQ(attend(4, {}).reason(), "BAD_POSITION");
  EXPECT_EQ(attend(1, -1).reason(), "BAD_POSITION");
  EXPECT_THAT(h.Mean(id, {6}).out, ElementsAre(3));
}

TEST(Lifecycle, K09UnwrittenAndRecycledMemoryIsNeverSeen) {
  Harness h;  // its cache is poisoned with NaN
  const std::string a = h.Create();
  EXPECT_TRUE(h.Mean(a, std::vector<float>(16, 1000)).status.ok());
  EXPECT_TRUE(h.engine->CloseSession(a).value());
  const std::string b = h.Create();
  EXPECT_THAT(h.Mean(b, {1, 2, 3}).out, ElementsAre(1, 1.5, 2));
  // After a failed append, too: its rows may lie behind the end.
  EXPECT_EQ(h.Mean(b, {50, 50, 50, kNan}).reason(), "NOT_FINITE");
  StepArgs overflow = Harness::MeanArgs(b, {50});
  overflow.q = overflow.k = {3e38f};
  EXPECT_EQ(h.Step(overflow).reason(), "SCORE_OVERFLOW");
  EXPECT_THAT(h.Mean(b, {6}).out, ElementsAre(3));
}

TEST(Lifecycle, D05EmptySessionBesideANormalOne) {
  Harness h;
  const std::string empty = h.Create(), normal = h.Create();
  EXPECT_TRUE(h.Mean(normal, {1, 2}).status.ok());
  StepArgs args;
  for (const std::string& id : {empty, normal}) {
    StepSegment segment;
    segment.session_id = id;
    segment.num_tokens = 1;
    segment.start_position = 1;
    args.segments.push_back(segment);
  }
  args.q = {0, 0};
  args.return_lse = true;
  StepAnswer answer = h.Step(args);
  EXPECT_EQ(GetErrorDetails(answer.segments[0].status).reason, "EMPTY_ROW");
  EXPECT_TRUE(answer.segments[1].status.ok());
  EXPECT_THAT(answer.out, ElementsAre(0, 1.5));
  EXPECT_THAT(answer.lse, ElementsAre(0, FloatEq(std::log(2.0f))));
  args.zero_empty_rows = true;
  answer = h.Step(args);
  EXPECT_TRUE(answer.status.ok());
  EXPECT_THAT(answer.out, ElementsAre(0, 1.5));
  EXPECT_THAT(answer.lse, ElementsAre(-INFINITY, FloatEq(std::log(2.0f))));
}

TEST(Lifecycle, MaskAmongNewTokensAndEmptyRows) {
  Harness h;
  const std::string id = h.Create();
  // A tree: 0 <- 1, 0 <- 2. Row 2 does not see token 1.
  const uint8_t tree = 0b101'011'001 & 0xff, rest = 0b1;
  const uint8_t bits[2] = {tree, rest};
  StepArgs args = Harness::MeanArgs(id, {1, 3, 5});
  args.segments[0].mask.bits = bits;
  EXPECT_THAT(h.Step(args).out, ElementsAre(1, 2, 3));
  // Of the tokens before them everything stays visible.
  EXPECT_THAT(h.Step(args).out, ElementsAre(2.5, FloatEq(13.0f / 5), FloatEq(15.0f / 5)));
  const uint8_t none[2] = {0, 0};
  const std::string fresh = h.Create();
  args = Harness::MeanArgs(fresh, {1, 3, 5});
  args.segments[0].mask.bits = none;
  const StepAnswer answer = h.Step(args);
  EXPECT_EQ(answer.reason(), "EMPTY_ROW");
  EXPECT_EQ(answer.metadata("row"), "0");
  EXPECT_EQ(h.Length(fresh), 0);
}

TEST(Lifecycle, SegmentsSucceedAndFailAlone) {
  Harness h;
  const std::string a = h.Create(), b = h.Create(), c = h.Create();
  EXPECT_TRUE(h.engine->CloseSession(c).value());
  StepArgs args;
  for (const std::string& id : {a, std::string(kUnknownId), b, c, std::string("?")}) {
    StepSegment segment;
    segment.session_id = id;
    segment.num_tokens = 2;
    args.segments.push_back(segment);
  }
  args.segments[2].start_position = 7;
  args.q = args.k = std::vector<float>(10, 0);
  args.v = {2, 4, 9, 9, 9, 9, 9, 9, 9, 9};
  args.return_lse = true;
  const StepAnswer answer = h.Step(args);
  EXPECT_TRUE(answer.segments[0].status.ok());
  EXPECT_EQ(answer.segments[0].length, 2);
  EXPECT_EQ(GetErrorDetails(answer.segments[1].status).reason, "NEVER_EXISTED");
  EXPECT_EQ(GetErrorDetails(answer.segments[2].status).reason, "BAD_POSITION");
  EXPECT_EQ(GetErrorDetails(answer.segments[3].status).reason, "CLOSED");
  EXPECT_EQ(GetErrorDetails(answer.segments[4].status).reason, "BAD_SESSION_ID");
  EXPECT_THAT(answer.out, ElementsAre(2, 3, 0, 0, 0, 0, 0, 0, 0, 0));
  EXPECT_THAT(answer.lse, ElementsAre(0, FloatEq(std::log(2.0f)), 0, 0, 0, 0, 0, 0, 0, 0));
  EXPECT_EQ(h.Length(b), 0);

  args.segments.resize(1);
  args.segments.push_back(args.segments[0]);
  args.q = args.k = args.v = std::vector<float>(4, 0);
  EXPECT_EQ(h.Step(args).reason(), "DUPLICATE_SESSION");
  EXPECT_EQ(h.Length(a), 2);
}

TEST(Lifecycle, SessionsOfAStepShareHeadsAndDims) {
  Harness h;
  SessionConfig wide = TinyConfig();
  wide.heads = {2, 1};
  const std::string a = h.Create(), b = h.Create(wide);
  StepArgs args = Harness::MeanArgs(a, {1});
  args.segments.push_back(Harness::MeanArgs(b, {1}).segments[0]);
  args.q = args.k = args.v = {0, 0};
  EXPECT_EQ(h.Step(args).reason(), "BAD_SHAPE");
}

TEST(Lifecycle, V01ByteCountsAndSizes) {
  Harness h;
  const std::string id = h.Create();
  const auto refuse = [&](auto&& change) {
    StepArgs args = Harness::MeanArgs(id, {1, 2});
    change(&args);
    const StepAnswer answer = h.Step(args);
    EXPECT_EQ(answer.status.code(), absl::StatusCode::kInvalidArgument) << answer.status;
    EXPECT_EQ(answer.reason(), "BAD_SHAPE");
    EXPECT_TRUE(answer.out.empty());  // nothing was allocated for it
  };
  refuse([](StepArgs* a) { a->q.pop_back(); });
  refuse([](StepArgs* a) { a->k.push_back(0); });
  refuse([](StepArgs* a) { a->v.clear(); });
  refuse([](StepArgs* a) { a->q.clear(), a->k.clear(), a->v.clear(); });
  refuse([](StepArgs* a) { a->segments.clear(); });
  for (const int64_t tokens :
       std::initializer_list<int64_t>{0, -1, 1, 3, int64_t{1} << 31, int64_t{1} << 62, INT64_MAX, INT64_MIN}) {
    refuse([&](StepArgs* a) { a->segments[0].num_tokens = tokens; });
  }
  EXPECT_EQ(h.used_bytes(), 0);
}

TEST(Lifecycle, S21OnlyTheSessionThatAsksTooMuchIsRefused) {
  EngineOptions options = Harness::DefaultOptions();
  options.kv_cache_bytes = 16 * kTinyBlock;  // 1024 tokens
  Harness h(options);
  const std::string a = h.Create(), b = h.Create(), c = h.Create();
  EXPECT_TRUE(h.Mean(a, std::vector<float>(896, 1)).status.ok());
  EXPECT_TRUE(h.Mean(b, std::vector<float>(10, 2)).status.ok());
  EXPECT_TRUE(h.Mean(c, std::vector<float>(10, 3)).status.ok());
  const StepAnswer full = h.Mean(a, std::vector<float>(100, 5));
  EXPECT_EQ(full.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(full.reason(), "CACHE_FULL");
  EXPECT_EQ(full.metadata("needed_bytes"), "1024");
  EXPECT_EQ(full.metadata("available_bytes"), "0");
  EXPECT_GT(GetErrorDetails(full.status).retry_delay, absl::ZeroDuration());
  EXPECT_EQ(h.Length(a), 896);
  EXPECT_THAT(h.Mean(b, {2}).out, ElementsAre(2));
  EXPECT_THAT(h.Mean(c, {3}).out, ElementsAre(3));
  EXPECT_TRUE(h.engine->CloseSession(b).value());
  EXPECT_TRUE(h.Mean(a, std::vector<float>(64, 1)).status.ok());
}

TEST(Lifecycle, C01WhatCanNeverFitIsRefusedAtOnce) {
  EngineOptions options = Harness::DefaultOptions();
  options.kv_cache_bytes = 16 * kTinyBlock;
  Harness h(options);
  const std::string a = h.Create();
  const StepAnswer never = h.Mean(a, std::vector<float>(1025, 1));
  EXPECT_EQ(never.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(never.reason(), "TOO_MANY_TOKENS");
  EXPECT_EQ(GetErrorDetails(never.status).retry_delay, absl::ZeroDuration());
  EXPECT_THAT(std::string(never.status.message()), HasSubstr("8704"));
  EXPECT_THAT(std::string(never.status.message()), HasSubstr("8192"));
  for (int i = 0; i < 10; i++) {
    const std::string id = h.Create();
    EXPECT_TRUE(h.Mean(id, {1}).status.ok());
    EXPECT_TRUE(h.engine->CloseSession(id).value());
  }
  EXPECT_EQ(h.engine->stats().queue_depth, 0);
  // Not at once but in the end.
  EXPECT_TRUE(h.Mean(a, std::vector<float>(300, 1)).status.ok());
  EXPECT_EQ(h.Mean(a, std::vector<float>(900, 1)).reason(), "TOO_MANY_TOKENS");

  SessionConfig limited = TinyConfig();
  limited.max_tokens = 5;
  const std::string b = h.Create(limited);
  EXPECT_EQ(h.Mean(b, std::vector<float>(6, 1)).reason(), "TOO_MANY_TOKENS");
  EXPECT_TRUE(h.Mean(b, std::vector<float>(5, 1)).status.ok());
  const StepAnswer beyond = h.Mean(b, {1});
  EXPECT_EQ(beyond.reason(), "TOO_MANY_TOKENS");
  EXPECT_EQ(beyond.metadata("requested"), "6");
  EXPECT_EQ(beyond.metadata("limit"), "5");
  EXPECT_TRUE(h.Mean(b, {1}, 4).status.ok());  // a replay does not grow
}

TEST(Lifecycle, Reservations) {
  EngineOptions options = Harness::DefaultOptions();
  options.kv_cache_bytes = 16 * kTinyBlock;
  Harness h(options);
  SessionConfig config = TinyConfig();
  config.num_layers = 2;
  config.reserve_tokens = 256;
  const std::string a = h.Create(config);
  EXPECT_EQ(h.engine->stats().reserved_bytes, 8 * kTinyBlock);
  EXPECT_EQ(h.engine->stats().used_bytes, 0);
  EXPECT_EQ(h.engine->Estimate(TinyConfig()).tokens_available, 512);
  EXPECT_EQ(h.engine->Estimate(TinyConfig()).tokens_capacity, 1024);
  EXPECT_EQ(h.engine->Estimate(config).bytes_per_token, 16);
  config.reserve_tokens = 320;
  absl::Status status = h.TryCreate(config).status();
  EXPECT_EQ(GetErrorDetails(status).reason, "CACHE_FULL");
  EXPECT_GT(GetErrorDetails(status).retry_delay, absl::ZeroDuration());
  config.reserve_tokens = 1 << 29;  // never
  status = h.TryCreate(config).status();
  EXPECT_EQ(GetErrorDetails(status).reason, "CACHE_FULL");
  EXPECT_EQ(GetErrorDetails(status).retry_delay, absl::ZeroDuration());
  const std::string b = h.Create();
  EXPECT_TRUE(h.Mean(b, std::vector<float>(512, 1)).status.ok());
  EXPECT_EQ(h.Mean(b, {1}).reason(), "CACHE_FULL");
  for (int layer = 0; layer < 2; layer++) {
    StepArgs args = Harness::MeanArgs(a, std::vector<float>(256, 2));
    args.layer = layer;
    EXPECT_TRUE(h.Step(args).status.ok());
  }
  EXPECT_EQ(h.engine->stats().used_bytes, 16 * kTinyBlock);
  EXPECT_EQ(h.engine->stats().reserved_bytes, 16 * kTinyBlock);
  EXPECT_TRUE(h.engine->CloseSession(a).value());
  EXPECT_TRUE(h.engine->CloseSession(b).value());
  EXPECT_EQ(h.engine->stats().reserved_bytes, 0);
}

TEST(Lifecycle, ListsByPagesInOrder) {
  Harness h;
  std::vector<std::string> ids;
  for (int i = 0; i < 150; i++) ids.push_back(h.Create());
  EXPECT_TRUE(h.engine->CloseSession(ids[70]).value());
  ids.erase(ids.begin() + 70);
  std::vector<std::string> listed;
  uint64_t after = 0;
  for (;;) {
    const std::vector<SessionInfo> page = h.engine->ListSessions(after, 66);
    for (const SessionInfo& info : page) listed.push_back(info.session_id);
    if (page.size() < 66) break;
    after = page.back().sequence;
  }
  EXPECT_EQ(listed, ids);
}

}  // namespace
}  // namespace attnd

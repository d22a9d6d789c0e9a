// The bits of an answer do not depend on how its tokens came in, on the chunks they were computed in, on the number of
// threads or on what else is computed (scenario K34; design: Determinism).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/reference.h"
#include "tests/unit/engine/engine_harness.h"

namespace attnd {
namespace {

constexpr HeadCounts kHeads = {6, 2};
constexpr int kHeadDim = 40, kValueDim = 72;
constexpr int64_t kTokens = kThreadSanitizer ? 150 : 700;  // ends inside a block, of the second run

struct Sequence {
  std::vector<float> q = RandomFloats(1, kTokens* kHeads.num_q_heads* kHeadDim);
  std::vector<float> k = RandomFloats(2, kTokens* kHeads.num_kv_heads* kHeadDim);
  std::vector<float> v = RandomFloats(3, kTokens* kHeads.num_kv_heads* kValueDim);
};

const Sequence& TheSequence() {
  static const Sequence& sequence = *new Sequence;
  return sequence;
}

SessionConfig Config(KvDType dtype) {
  SessionConfig config = TinyConfig();
  config.heads = kHeads;
  config.shape = {kHeadDim, kValueDim, dtype};
  config.softmax_scale = 1 / std::sqrt(static_cast<float>(kHeadDim));
  return config;
}

std::vector<float> Rows(const std::vector<float>& tensor, int64_t begin, int64_t end, int64_t row) {
  return {tensor.begin() + begin * row, tensor.begin() + end * row};
}

StepArgs TokensArgs(const std::string& id, int64_t begin, int64_t end) {
  const Sequence& s = TheSequence();
  StepArgs args;
  args.segments.resize(1);
  args.segments[0].session_id = id;
  args.segments[0].num_tokens = end - begin;
  args.q = Rows(s.q, begin, end, kHeads.num_q_heads * kHeadDim);
  args.k = Rows(s.k, begin, end, kHeads.num_kv_heads * kHeadDim);
  args.v = Rows(s.v, begin, end, kHeads.num_kv_heads * kValueDim);
  args.return_lse = true;
  return args;
}

struct Answer {
  std::vector<float> out, lse;
};

// The whole sequence through a session, in steps of the given sizes, the last repeated.
Answer RunSteps(Harness* h, KvDType dtype, const std::vector<int64_t>& sizes) {
  Answer answer;
  const std::string id = h->Create(Config(dtype));
  int64_t begin = 0;
  for (size_t i = 0; begin < kTokens; i++) {
    const int64_t end = std::min(kTokens, begin + sizes[std::min(i, sizes.size() - 1)]);
    const StepAnswer step = h->Step(TokensArgs(id, begin, end));
    EXPECT_TRUE(step.status.ok()) << step.status;
    answer.out.insert(answer.out.end(), step.out.begin(), step.out.end());
    answer.lse.insert(answer.lse.end(), step.lse.begin(), step.lse.end());
    begin = end;
  }
  EXPECT_TRUE(h->engine->CloseSession(id).value());
  return answer;
}

EngineOptions Options(int threads, int64_t chunk) {
  EngineOptions options = Harness::DefaultOptions();
  options.compute_threads = threads;
  options.prefill_chunk_tokens = chunk;
  return options;
}

std::string NameOf(KvDType dtype) {
  return dtype == KvDType::kF32 ? "F32" : dtype == KvDType::kBf16 ? "Bf16" : dtype == KvDType::kF16 ? "F16" : "Int8";
}

class Bits : public testing::TestWithParam<KvDType> {
 protected:
  Answer Whole() {
    Harness h(Options(1, kTokens));
    return RunSteps(&h, GetParam(), {kTokens});
  }
  void ExpectSame(const Answer& actual, const Answer& expected, const std::string& what) {
    EXPECT_TRUE(SameBits(actual.out, expected.out)) << what;
    EXPECT_TRUE(SameBits(actual.lse, expected.lse)) << what;
  }
};

TEST_P(Bits, AnswersAreRight) {
  const Answer answer = Whole();
  const SessionConfig config = Config(GetParam());
  const Sequence& s = TheSequence();
  ReferenceInput input;
  input.heads = kHeads;
  input.head_dim = kHeadDim;
  input.value_dim = kValueDim;
  input.softmax.softmax_scale = config.softmax_scale;
  input.q.assign(s.q.begin(), s.q.end());
  input.k.assign(s.k.begin(), s.k.end());
  input.v.assign(s.v.begin(), s.v.end());
  const ReferenceOutput reference = ReferenceAttention(input);
  // Against the values as given, so storing them costs too.
  const double bound = GetParam() == KvDType::kF32 ? 1e-5 : GetParam() == KvDType::kInt8 ? 4e-2 : 2e-2;
  for (int64_t row = 0; row < kTokens; row++) {
    double error = 0, norm = 0;
    for (int64_t i = row * kHeads.num_q_heads * kValueDim; i < (row + 1) * kHeads.num_q_heads * kValueDim; i++) {
      error += std::pow(answer.out[i] - reference.out[i], 2);
      norm += std::pow(reference.out[i], 2);
    }
    ASSERT_LE(std::sqrt(error / norm), bound) << row;
  }
}

TEST_P(Bits, TokenByTokenAndInStepsOfAnySize) {
  const Answer whole = Whole();
  Harness h(Options(2, 256));
  ExpectSame(RunSteps(&h, GetParam(), {1}), whole, "token by token");
  ExpectSame(RunSteps(&h, GetParam(), {kTokens}), whole, "one prefill");
  ExpectSame(RunSteps(&h, GetParam(), {500, 1}), whole, "prefill and decodes");
  ExpectSame(RunSteps(&h, GetParam(), {63, 2, 64, 65, 9}), whole, "odd sizes");
}

TEST_P(Bits, ChunksOfAnySize) {
  const Answer whole = Whole();
  for (const int64_t chunk : {1, 7, 64, 65, 333}) {
    Harness h(Options(2, chunk));
    ExpectSame(RunSteps(&h, GetParam(), {kTokens}), whole, "chunks of " + std::to_string(chunk));
  }
}

TEST_P(Bits, AnyNumberOfThreads) {
  const Answer whole = Whole();
  for (const int threads : {1, 2, 5}) {
    Harness h(Options(threads, 256));
    ExpectSame(RunSteps(&h, GetParam(), {300, 1, 64, 1}), whole, std::to_string(threads) + " threads");
  }
}

// 32 other sessions prefill and decode from 4 threads meanwhile.
TEST_P(Bits, AmongOthers) {
  const Answer whole = Whole();
  Harness h(Options(2, 128));
  std::atomic<bool> stop{false};
  std::vector<std::thread> others;
  for (int t = 0; t < 4; t++) {
    others.emplace_back([&, t] {
      std::vector<std::string> ids;
      for (int i = 0; i < 8; i++) ids.push_back(h.Create(Config(i % 2 ? KvDType::kF32 : KvDType::kBf16)));
      std::vector<int64_t> at(8, 0);
      for (int n = 0; !stop; n++) {
        std::vector<std::future<StepAnswer>> answers;
        for (int i = 0; i < 8; i++) {
          const int64_t tokens = std::min((n + t + i) % 5 == 0 ? int64_t{100} : int64_t{1}, kTokens - at[i]);
          if (tokens > 0) answers.push_back(h.Start(TokensArgs(ids[i], at[i], at[i] + tokens)));
          at[i] += tokens;
        }
        for (auto& answer : answers) EXPECT_TRUE(answer.get().status.ok());
        for (int i = 0; i < 8; i++) {
          if (at[i] < kTokens) continue;
          EXPECT_TRUE(h.engine->CloseSession(ids[i]).value());
          ids[i] = h.Create(Config(i % 2 ? KvDType::kF32 : KvDType::kBf16));
          at[i] = 0;
        }
      }
    });
  }
  if (!kThreadSanitizer) ExpectSame(RunSteps(&h, GetParam(), {1}), whole, "token by token");
  ExpectSame(RunSteps(&h, GetParam(), {kTokens - 50, 1}), whole, "prefill and decodes");
  stop = true;
  for (std::thread& thread : others) thread.join();
}

// A replay and what follows a rewind: the same place, the same bits.
TEST_P(Bits, ReplayAndRewind) {
  const Answer whole = Whole();
  Harness h(Options(2, 256));
  const std::string id = h.Create(Config(GetParam()));
  EXPECT_TRUE(h.Step(TokensArgs(id, 0, kTokens)).status.ok());
  const auto tail = [&](int64_t start) {
    const size_t floats = (kTokens - start) * kHeads.num_q_heads * kValueDim;
    return std::vector<float>(whole.out.end() - static_cast<ptrdiff_t>(floats), whole.out.end());
  };
  for (const int64_t start : {0, 1, 63, 64, 149, 511, 512, 640, 699}) {
    if (start >= kTokens) break;
    StepArgs args = TokensArgs(id, start, kTokens);
    args.segments[0].start_position = start;
    EXPECT_TRUE(SameBits(h.Step(args).out, tail(start))) << "replay from " << start;
  }
  for (const int64_t cut : {650, 300, 63, 0}) {
    if (cut > kTokens) continue;
    ASSERT_TRUE(h.Rewind(id, cut).ok());
    EXPECT_TRUE(SameBits(h.Step(TokensArgs(id, cut, kTokens)).out, tail(cut))) << "rewound to " << cut;
  }
}

// The stateless call answers as a session of that dtype would.
TEST_P(Bits, StatelessCall) {
  const Answer whole = Whole();
  for (const int64_t chunk : {int64_t{100}, kTokens}) {
    Harness h(Options(2, chunk));
    const Sequence& s = TheSequence();
    const SessionConfig config = Config(GetParam());
    Answer answer;
    answer.out.resize(whole.out.size());
    answer.lse.resize(whole.lse.size());
    std::vector<float> weights(kHeads.num_q_heads * kTokens * kTokens);
    AttendTask task;
    task.heads = config.heads;
    task.shape = config.shape;
    task.softmax.softmax_scale = config.softmax_scale;
    task.num_queries = task.num_keys = kTokens;
    task.q = reinterpret_cast<const std::byte*>(s.q.data());
    task.k = reinterpret_cast<const std::byte*>(s.k.data());
    task.v = reinterpret_cast<const std::byte*>(s.v.data());
    task.out = reinterpret_cast<std::byte*>(answer.out.data());
    task.lse = answer.lse.data();
    task.weights = weights.data();
    std::promise<absl::Status> done;
    task.done = [&](absl::Status status, absl::Duration, absl::Duration) { done.set_value(std::move(status)); };
    h.engine->SubmitAttend(std::move(task));
    const absl::Status status = done.get_future().get();
    EXPECT_TRUE(status.ok()) << status;
    ExpectSame(answer, whole, "stateless, chunks of " + std::to_string(chunk));
    for (int64_t row = 0; row < kHeads.num_q_heads * kTokens; row++) {
      double sum = 0;
      for (int64_t j = 0; j < kTokens; j++) {
        const float w = weights[row * kTokens + j];
        ASSERT_TRUE(w >= 0 && w <= 1.0001f && (j <= row % kTokens || w == 0)) << row << " " << j << " " << w;
        sum += w;
      }
      ASSERT_NEAR(sum, 1, 1e-2);
    }
    EXPECT_EQ(h.used_bytes(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(KvDTypes, Bits, testing::Values(KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8),
                         [](const auto& param) { return NameOf(param.param); });

// Every query of a step sees every key of it: chunks must not hide the later ones.
TEST(BitsNonCausal, ChunksSeeAllKeys) {
  std::vector<float> first;
  for (const int64_t chunk : {1000, 64, 10}) {
    Harness h(Options(2, chunk));
    SessionConfig config = Config(KvDType::kF32);
    config.causal = false;
    const std::string id = h.Create(config);
    const StepAnswer answer = h.Step(TokensArgs(id, 0, 150));
    ASSERT_TRUE(answer.status.ok()) << answer.status;
    if (first.empty()) first = answer.out;
    EXPECT_TRUE(SameBits(answer.out, first)) << chunk;
  }
}

}  // namespace
}  // namespace attnd

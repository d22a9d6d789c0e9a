// The stateless call: scratch memory, errors, cancellation, and that it is no session.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <memory>
#include <vector>

#include "tests/unit/engine/engine_harness.h"

namespace attnd {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatEq;

// Bytes of one block of the tiny shape: 64 keys and values of one float.
constexpr int64_t kTinyBlock = 512;

struct AttendCall {
  AttendTask task;
  std::vector<float> q, k, v, out, lse;
  std::promise<absl::Status> done;
  std::future<absl::Status> status = done.get_future();
};

// Every dim and head count 1, scale 1, not causal.
std::unique_ptr<AttendCall> MakeCall(std::vector<float> q, std::vector<float> k, std::vector<float> v) {
  auto call = std::make_unique<AttendCall>();
  call->q = std::move(q), call->k = std::move(k), call->v = std::move(v);
  call->out.assign(call->q.size(), -777);
  call->lse.assign(call->q.size(), -777);
  AttendTask& task = call->task;
  task.heads = {1, 1};
  task.shape = {1, 1, KvDType::kF32};
  task.softmax.causal = false;
  task.num_queries = static_cast<int64_t>(call->q.size());
  task.num_keys = static_cast<int64_t>(call->k.size());
  task.q = reinterpret_cast<const std::byte*>(call->q.data());
  task.k = reinterpret_cast<const std::byte*>(call->k.data());
  task.v = reinterpret_cast<const std::byte*>(call->v.data());
  task.out = reinterpret_cast<std::byte*>(call->out.data());
  task.lse = call->lse.data();
  task.done = [raw = call.get()](absl::Status status, absl::Duration, absl::Duration) {
    raw->done.set_value(std::move(status));
  };
  return call;
}

void Submit(Harness* h, AttendCall* call) { h->engine->SubmitAttend(std::move(call->task)); }

absl::Status RunCall(Harness* h, AttendCall* call) {
  Submit(h, call);
  return call->status.get();
}

std::string Reason(const absl::Status& status) { return GetErrorDetails(status).reason; }

TEST(Attend, PlainCall) {
  Harness h;
  auto call = MakeCall({1}, {1000, 1001, 1002}, {1, 2, 3});
  EXPECT_TRUE(RunCall(&h, call.get()).ok());
  EXPECT_NEAR(call->out[0], 2.5752104, 1e-6);
  EXPECT_EQ(h.used_bytes(), 0);
  EXPECT_EQ(h.engine->stats().sessions_active, 0);
}

TEST(Attend, CausalWithAnOffsetAndMoreQueriesThanKeys) {
  Harness h;
  auto call = MakeCall({0, 0}, {0, 0, 0, 0}, {1, 3, 5, 7});
  call->task.softmax.causal = true;
  call->task.first_position = 2;
  EXPECT_TRUE(RunCall(&h, call.get()).ok());
  EXPECT_THAT(call->out, ElementsAre(3, 4));

  // Rows 0 and 1 see nothing.
  call = MakeCall({0, 0, 0}, {0}, {5});
  call->task.softmax.causal = true;
  call->task.first_position = -2;
  call->task.zero_empty_rows = true;
  EXPECT_TRUE(RunCall(&h, call.get()).ok());
  EXPECT_THAT(call->out, ElementsAre(0, 0, 5));
  EXPECT_THAT(call->lse, ElementsAre(-INFINITY, -INFINITY, 0));

  call = MakeCall({0, 0, 0}, {0}, {5});
  call->task.softmax.causal = true;
  call->task.first_position = -2;
  const absl::Status status = RunCall(&h, call.get());
  EXPECT_EQ(Reason(status), "EMPTY_ROW");
  EXPECT_EQ(GetErrorDetails(status).metadata["row"], "0");
}

TEST(Attend, NoKeysAtAll) {
  Harness h;
  auto call = MakeCall({1, 2}, {}, {});
  EXPECT_EQ(Reason(RunCall(&h, call.get())), "EMPTY_ROW");
  call = MakeCall({1, 2}, {}, {});
  call->task.zero_empty_rows = true;
  EXPECT_TRUE(RunCall(&h, call.get()).ok());
  EXPECT_THAT(call->out, ElementsAre(0, 0));
}

// Masked rows in every chunk: the mask's rows go with the chunk's.
TEST(Attend, MaskOverManyChunks) {
  EngineOptions options = Harness::DefaultOptions();
  options.prefill_chunk_tokens = 7;
  Harness h(options);
  constexpr int kRows = 100, kKeys = 70;
  std::vector<float> v(kKeys);
  for (int j = 0; j < kKeys; j++) v[j] = static_cast<float>(j);
  std::vector<uint8_t> bits((kRows * kKeys + 7) / 8);
  for (int i = 0; i < kRows; i++) {
    const int bit = i * kKeys + i % kKeys;  // row i sees key i % kKeys alone
    bits[bit / 8] |= static_cast<uint8_t>(1 << bit % 8);
  }
  auto call = MakeCall(std::vector<float>(kRows, 0), std::vector<float>(kKeys, 0), v);
  call->task.mask.bits = bits.data();
  call->task.mask.columns = kKeys;
  EXPECT_TRUE(RunCall(&h, call.get()).ok());
  for (int i = 0; i < kRows; i++) EXPECT_EQ(call->out[i], static_cast<float>(i % kKeys)) << i;
  EXPECT_GE(h.observer["batch"], kRows / 7);
}

TEST(Attend, BadNumbersAndTypes) {
  Harness h;
  auto call = MakeCall({1}, {1, NAN}, {1, 2});
  EXPECT_EQ(Reason(RunCall(&h, call.get())), "NOT_FINITE");
  call = MakeCall({3e38f}, {3e38f}, {1});
  EXPECT_EQ(Reason(RunCall(&h, call.get())), "SCORE_OVERFLOW");
  call = MakeCall({1}, {1e5f}, {1});
  call->task.shape.dtype = KvDType::kF16;
  EXPECT_EQ(Reason(RunCall(&h, call.get())), "NOT_FINITE");
  call = MakeCall({1}, {1e5f}, {1});
  call->task.shape.dtype = KvDType::kInt8;
  EXPECT_TRUE(RunCall(&h, call.get()).ok());
  EXPECT_FLOAT_EQ(call->out[0], 1);
}

TEST(Attend, ScratchMemoryIsBounded) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.max_attend_bytes = 4 * kTinyBlock;
  options.prefill_chunk_tokens = 8;
  options.compute_hook = gate.hook();
  Harness h(options);
  const std::string id = h.Create();
  const std::vector<float> keys(256, 0), values(256, 3);
  auto never = MakeCall({0}, std::vector<float>(257, 0), std::vector<float>(257, 1));
  const absl::Status status = RunCall(&h, never.get());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Reason(status), "TOO_MANY_TOKENS");
  EXPECT_EQ(GetErrorDetails(status).retry_delay, absl::ZeroDuration());
  // What fits waits for what runs.
  std::vector<std::unique_ptr<AttendCall>> calls;
  for (int i = 0; i < 10; i++) {
    calls.push_back(MakeCall(std::vector<float>(20, 0), keys, values));
    Submit(&h, calls.back().get());
  }
  gate.AwaitArrival();
  auto step = h.Start(Harness::MeanArgs(id, {5}));
  gate.Open();
  EXPECT_THAT(step.get().out, ElementsAre(5));
  for (auto& call : calls) {
    EXPECT_TRUE(call->status.get().ok());
    for (const float x : call->out) EXPECT_THAT(x, FloatEq(3));
  }
  EXPECT_EQ(h.engine->stats().queue_depth, 0);
}

TEST(Attend, CancelledBetweenChunksAndRefusedWhileDraining) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.prefill_chunk_tokens = 8;
  options.compute_hook = gate.hook();
  Harness h(options);
  auto call = MakeCall(std::vector<float>(100, 0), {0}, {1});
  call->task.cancel = std::make_shared<CancelToken>();
  const std::shared_ptr<CancelToken> cancel = call->task.cancel;
  Submit(&h, call.get());
  gate.AwaitArrival();
  cancel->cancelled = true;
  gate.Open();
  EXPECT_EQ(call->status.get().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(h.engine->Drain(absl::Now() + absl::Seconds(10)));
  call = MakeCall({0}, {0}, {1});
  EXPECT_EQ(RunCall(&h, call.get()).code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace attnd

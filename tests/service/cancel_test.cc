// A step that is given up, by its client or by its deadline, at every state that it can be in: its session is as it was
// before, in length and in memory, and nothing of it is left in the server. G14: run under AddressSanitizer too.
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/service/harness.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;

enum class State { kQueued, kFirstChunk, kBetweenChunks, kLastChunk };
constexpr const char* kStateNames[] = {"Queued", "FirstChunk", "BetweenChunks", "LastChunk"};
enum class How { kCancel, kDeadline };
constexpr const char* kHowNames[] = {"Cancel", "Deadline"};
enum class Call { kUnary, kStream };
constexpr const char* kCallNames[] = {"Unary", "Stream"};

constexpr int kChunkTokens = 64;
constexpr int kTokens = 200;  // chunks of 64, 64, 64 and 8

class CancelTest : public ServiceTest, public ::testing::WithParamInterface<std::tuple<State, How, Call>> {
 protected:
  // Lets computation go on until the step is in that state, with the gate closed.
  void Reach(State state) {
    if (state == State::kQueued) return;  // behind the other session's step, which holds compute
    gate_.AwaitBatch();
    const int chunks = state == State::kFirstChunk ? 0 : state == State::kBetweenChunks ? 1 : 3;
    for (int i = 0; i < chunks; ++i) {
      gate_.PassOne();
      gate_.AwaitBatch();
    }
  }
  void GiveUp(How how, grpc::ClientContext* context) {
    if (how == How::kCancel) return context->TryCancel();
    // The deadline comes by itself.
  }
  // One call of the step, until the client knows that it is over.
  void CallStep(Call call, const v1::StepRequest& request, grpc::ClientContext* context) {
    v1::StepResponse response;
    grpc::Status status;
    if (call == Call::kUnary) {
      status = stub_->Step(context, request, &response);
    } else {
      const auto stream = stub_->StepStream(context);
      EXPECT_TRUE(stream->Write(request));
      EXPECT_FALSE(stream->Read(&response));
      status = stream->Finish();
    }
    EXPECT_EQ(status.error_code(),
              std::get<How>(GetParam()) == How::kCancel ? StatusCode::CANCELLED : StatusCode::DEADLINE_EXCEEDED);
  }
};

TEST_P(CancelTest, G14_AStepThatIsGivenUpLeavesNoTrace) {
  const auto [state, how, call] = GetParam();
  Options options = DefaultOptions();
  options.prefill_chunk_tokens = kChunkTokens;
  StartServer(options);
  const std::string id = Create(), other = Create();
  Mean(id, {1, 2, 3});
  const v1::Session before = Get(id);
  gate_.Close();
  std::thread holder;
  if (state == State::kQueued) {
    holder = std::thread([&] { EXPECT_EQ(Mean(other, {5}), Floats({5})); });
    gate_.AwaitBatch();
  }
  grpc::ClientContext context;
  // Time enough to get into any state; the states before it are reached within milliseconds.
  if (how == How::kDeadline) context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(1500));
  std::thread client([&, call = call] { CallStep(call, MeanStep(id, Floats(kTokens, 50)), &context); });
  ASSERT_TRUE(WaitForMetric("attnd_requests_in_flight", state == State::kQueued ? 2 : 1));
  Reach(state);
  GiveUp(how, &context);
  client.join();
  // While compute is still held up: the server knows, too, before it goes on.
  ASSERT_TRUE(WaitForMetric("attnd_requests_in_flight", state == State::kQueued ? 1 : 0));
  gate_.Open();
  if (holder.joinable()) holder.join();
  for (const char* gauge : {"attnd_requests_in_flight", "attnd_streams_active", "attnd_queue_depth",
                            "attnd_queue_tokens", "attnd_inflight_bytes"}) {
    EXPECT_TRUE(WaitForMetric(gauge, 0)) << gauge;
  }
  const char* const stage = state == State::kQueued ? "queued" : "computing";
  EXPECT_TRUE(WaitForMetric(absl::StrCat("attnd_cancelled_total{stage=\"", stage, "\"}"), 1));
  const v1::Session after = Get(id);
  EXPECT_EQ(after.length(), 3);
  EXPECT_EQ(after.used_bytes(), before.used_bytes());
  EXPECT_EQ(after.reserved_bytes(), before.reserved_bytes());
  EXPECT_EQ(Mean(id, {6}), Floats({3}));
}

INSTANTIATE_TEST_SUITE_P(
    States, CancelTest,
    ::testing::Combine(::testing::Values(State::kQueued, State::kFirstChunk, State::kBetweenChunks, State::kLastChunk),
                       ::testing::Values(How::kCancel, How::kDeadline), ::testing::Values(Call::kUnary, Call::kStream)),
    [](const auto& info) {
      return absl::StrCat(kStateNames[static_cast<int>(std::get<0>(info.param))],
                          kHowNames[static_cast<int>(std::get<1>(info.param))],
                          kCallNames[static_cast<int>(std::get<2>(info.param))]);
    });

// What was committed is whole, however little of its answer was read.
TEST_F(ServiceTest, G14_CancelWhileAnswersAreWrittenLeavesWholeSteps) {
  StartServer();
  v1::SessionConfig config = MeanConfig();
  config.set_head_dim(256);
  const std::string id = Create(config);
  constexpr int kStepTokens = 256;
  v1::StepRequest request = MeanStep(id, Floats(kStepTokens, 0));
  for (v1::Tensor* tensor : {request.mutable_q(), request.mutable_k(), request.mutable_v()}) {
    *tensor = F32(Floats(kStepTokens * 256, 1));
  }
  grpc::ClientContext context;
  const auto stream = stub_->StepStream(&context);
  for (int i = 0; i < 40; ++i) ASSERT_TRUE(stream->Write(request));
  // Those that are not read hold their bytes; no more is computed once all have been.
  ASSERT_TRUE(WaitForMetric("attnd_queue_depth", 0, absl::Seconds(60)));
  context.TryCancel();
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::CANCELLED);
  for (const char* gauge : {"attnd_streams_active", "attnd_requests_in_flight", "attnd_inflight_bytes"}) {
    EXPECT_TRUE(WaitForMetric(gauge, 0)) << gauge;
  }
  const int64_t length = Get(id).length();
  EXPECT_EQ(length % kStepTokens, 0);
  EXPECT_GT(length, 0);
  v1::StepResponse response;
  request.mutable_segments(0)->set_start_position(length);
  ASSERT_TRUE(Step(request, &response).ok());
  EXPECT_EQ(ToFloats(response.out()), Floats(kStepTokens * 256, 1));
}

}  // namespace
}  // namespace attnd::testing

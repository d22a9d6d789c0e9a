// StepStream: pipelining, order, bounds, errors, cancellation.
#include <algorithm>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/service/harness.h"
#include "tests/service/raw_call.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;

using ClientStream = grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>;

class StepStreamTest : public ServiceTest {
 protected:
  static v1::StepRequest Numbered(uint64_t number, v1::StepRequest request) {
    request.set_request_id(number);
    return request;
  }
};

TEST_F(StepStreamTest, S10_PipelinedStepsOfOneSessionAreAnsweredInOrder) {
  StartServer();
  const std::string id = Create();
  grpc::ClientContext context;
  std::unique_ptr<ClientStream> stream = stub_->StepStream(&context);
  std::thread writer([&] {
    for (int i = 1; i <= 200; ++i) EXPECT_TRUE(stream->Write(Numbered(i, MeanStep(id, {static_cast<float>(i)}))));
    EXPECT_TRUE(stream->WritesDone());
  });
  v1::StepResponse response;
  int answers = 0;
  while (stream->Read(&response)) {
    ++answers;
    EXPECT_EQ(response.request_id(), static_cast<uint64_t>(answers));
    EXPECT_FALSE(response.has_status());
    const Floats out = ToFloats(response.out());
    ASSERT_EQ(out.size(), 1u);
    EXPECT_NEAR(out[0], (answers + 1) / 2.0, 1e-4);
    EXPECT_EQ(response.segments(0).length(), answers);
  }
  writer.join();
  EXPECT_EQ(answers, 200);
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(Eventually([&] { return Handled("StepStream", "OK") == 1; }));
  EXPECT_EQ(Metric("attnd_streams_active"), 0);
  EXPECT_EQ(Metric("attnd_requests_in_flight"), 0);
}

TEST_F(StepStreamTest, AStepsErrorIsItsAnswerAndTheStreamGoesOn) {
  StartServer();
  const std::string id = Create();
  grpc::ClientContext context;
  std::unique_ptr<ClientStream> stream = stub_->StepStream(&context);
  v1::StepResponse response;
  const auto ask = [&](const v1::StepRequest& request) {
    EXPECT_TRUE(stream->Write(request));
    EXPECT_TRUE(stream->Read(&response));
    EXPECT_EQ(response.request_id(), request.request_id());
    return response.status();
  };
  EXPECT_EQ(ask(Numbered(7, MeanStep(id, {1}))).code(), 0);

  v1::StepRequest gap = Numbered(8, MeanStep(id, {1}));
  gap.mutable_segments(0)->set_start_position(5);
  const v1::StepStatus beyond = ask(gap);
  EXPECT_EQ(beyond.code(), static_cast<int>(StatusCode::FAILED_PRECONDITION));
  EXPECT_EQ(beyond.reason(), "BAD_POSITION");
  EXPECT_EQ(beyond.metadata().at("length"), "1");
  EXPECT_TRUE(response.out().data().empty());

  v1::StepRequest malformed = Numbered(9, MeanStep(id, {1}));
  malformed.mutable_q()->mutable_data()->pop_back();
  EXPECT_EQ(ask(malformed).reason(), "BAD_SHAPE");
  EXPECT_EQ(ask(Numbered(10, MeanStep("", {1}))).code(), static_cast<int>(StatusCode::INVALID_ARGUMENT));
  EXPECT_EQ(ask(Numbered(11, MeanStep("00000000000000000000000000000000", {1}))).reason(), "NEVER_EXISTED");

  EXPECT_EQ(ask(Numbered(12, MeanStep(id, {3}))).code(), 0);
  EXPECT_EQ(ToFloats(response.out()), Floats({2}));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(Metric("attnd_rejected_total{reason=\"BAD_POSITION\"}"), 1);
  EXPECT_EQ(Metric("attnd_rejected_total{reason=\"BAD_SHAPE\"}"), 1);
}

TEST_F(StepStreamTest, HalfCloseFinishesAfterTheLastAnswer) {
  StartServer();
  const std::string id = Create();
  gate_.Close();
  grpc::ClientContext context;
  std::unique_ptr<ClientStream> stream = stub_->StepStream(&context);
  for (int i = 1; i <= 5; ++i) ASSERT_TRUE(stream->Write(Numbered(i, MeanStep(id, {1}))));
  ASSERT_TRUE(stream->WritesDone());
  gate_.AwaitBatch();
  gate_.Open();
  v1::StepResponse response;
  int answers = 0;
  while (stream->Read(&response)) ++answers;
  EXPECT_EQ(answers, 5);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StepStreamTest, AShortStepOvertakesALongOne) {
  StartServer();
  v1::SessionConfig config = MeanConfig();
  config.set_head_dim(64);
  const std::string slow = Create(config), quick = Create();
  const int tokens = 8192;
  v1::StepRequest prefill = MeanStep(slow, Floats(tokens, 0));
  for (v1::Tensor* tensor : {prefill.mutable_q(), prefill.mutable_k(), prefill.mutable_v()}) {
    *tensor = F32(Floats(tokens * 64, 1));
  }
  grpc::ClientContext context;
  std::unique_ptr<ClientStream> stream = stub_->StepStream(&context);
  ASSERT_TRUE(stream->Write(Numbered(1, prefill)));
  ASSERT_TRUE(stream->Write(Numbered(2, MeanStep(quick, {3}))));
  v1::StepResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.request_id(), 2u);
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.request_id(), 1u);
  EXPECT_EQ(ToFloats(response.out()), Floats(tokens * 64, 1));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StepStreamTest, CancelDropsQueuedWorkAndReleasesTheGaugesAtOnce) {
  StartServer();
  const std::string id = Create();
  gate_.Close();
  grpc::ClientContext context;
  std::unique_ptr<ClientStream> stream = stub_->StepStream(&context);
  for (int i = 1; i <= 20; ++i) ASSERT_TRUE(stream->Write(Numbered(i, MeanStep(id, {1}))));
  gate_.AwaitBatch();
  ASSERT_TRUE(WaitForMetric("attnd_requests_in_flight", 20));
  context.TryCancel();
  // While compute still holds the first step.
  EXPECT_TRUE(WaitForMetric("attnd_streams_active", 0));
  EXPECT_TRUE(WaitForMetric("attnd_requests_in_flight", 0));
  gate_.Open();
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return Metric("attnd_queue_depth") == 0; }));
  EXPECT_EQ(Handled("StepStream", "CANCELLED"), 1);
  EXPECT_EQ(Mean(id, {4}), Floats({4})) << "nothing of the cancelled steps was appended";
  EXPECT_EQ(Metric("attnd_requests_in_flight"), 0);
  EXPECT_GE(Metric("attnd_cancelled_total{stage=\"queued\"}"), 19);
}

TEST_F(StepStreamTest, AtMostSixtyFourStepsAreInFlight) {
  StartServer();
  const std::string id = Create();
  gate_.Close();
  grpc::ClientContext context;
  std::unique_ptr<ClientStream> stream = stub_->StepStream(&context);
  std::thread writer([&] {
    for (int i = 1; i <= 300; ++i) ASSERT_TRUE(stream->Write(Numbered(i, MeanStep(id, {1}))));
    stream->WritesDone();
  });
  EXPECT_TRUE(WaitForMetric("attnd_requests_in_flight", 64));
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_EQ(Metric("attnd_requests_in_flight"), 64);
  gate_.Open();
  v1::StepResponse response;
  int answers = 0;
  while (stream->Read(&response)) ++answers;
  writer.join();
  EXPECT_EQ(answers, 300);
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StepStreamTest, AClientThatDoesNotReadIsNotReadFrom) {
  StartServer();
  v1::SessionConfig config = MeanConfig();
  config.set_head_dim(256);
  const std::string id = Create(config);
  // 256 kB in each direction: a few answers fill the transport's windows.
  v1::StepRequest request = MeanStep(id, Floats(256, 0));
  request.mutable_segments(0)->set_start_position(0);
  request.mutable_segments(0)->set_rewind(true);
  for (v1::Tensor* tensor : {request.mutable_q(), request.mutable_k(), request.mutable_v()}) {
    *tensor = F32(Floats(256 * 256, 1));
  }
  grpc::ClientContext context;
  std::unique_ptr<ClientStream> stream = stub_->StepStream(&context);
  constexpr int kSteps = 150;
  std::thread writer([&] {
    for (int i = 1; i <= kSteps; ++i) EXPECT_TRUE(stream->Write(Numbered(i, request)));
    stream->WritesDone();
  });
  EXPECT_TRUE(WaitForMetric("attnd_requests_in_flight", 64, absl::Seconds(20)));
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_LE(Metric("attnd_requests_in_flight"), 64);
  EXPECT_EQ(Mean(Create(), {1}), Floats({1})) << "others are served meanwhile";
  v1::StepResponse response;
  int answers = 0;
  while (stream->Read(&response)) {
    EXPECT_FALSE(response.has_status()) << response.status().message();
    ++answers;
  }
  writer.join();
  EXPECT_EQ(answers, kSteps);
  EXPECT_TRUE(stream->Finish().ok());
}

// The client goes away while answers wait to be written.
TEST_F(StepStreamTest, G10_PendingWritesHoldNoGauge) {
  StartServer();
  v1::SessionConfig config = MeanConfig();
  config.set_head_dim(256);
  const std::string id = Create(config);
  v1::StepRequest request = MeanStep(id, Floats(256, 0));
  request.mutable_segments(0)->set_start_position(0);
  request.mutable_segments(0)->set_rewind(true);
  for (v1::Tensor* tensor : {request.mutable_q(), request.mutable_k(), request.mutable_v()}) {
    *tensor = F32(Floats(256 * 256, 1));
  }
  grpc::ClientContext context;
  std::unique_ptr<ClientStream> stream = stub_->StepStream(&context);
  std::thread writer([&] {
    while (stream->Write(request)) {
    }
  });
  EXPECT_TRUE(WaitForMetric("attnd_requests_in_flight", 64, absl::Seconds(20)));
  context.TryCancel();
  EXPECT_TRUE(WaitForMetric("attnd_streams_active", 0));
  EXPECT_TRUE(WaitForMetric("attnd_requests_in_flight", 0));
  writer.join();
  EXPECT_EQ(stream->Finish().error_code(), StatusCode::CANCELLED);
  EXPECT_TRUE(Close(id).ok());
  EXPECT_TRUE(WaitForMetric("attnd_kv_cache_used_bytes", 0));
}

TEST_F(StepStreamTest, C06_CloseLeavesNoStepWithoutAnAnswer) {
  StartServer();
  const std::string id = Create();
  gate_.Close();
  grpc::ClientContext context;
  std::unique_ptr<ClientStream> stream = stub_->StepStream(&context);
  for (int i = 1; i <= 20; ++i) ASSERT_TRUE(stream->Write(Numbered(i, MeanStep(id, {1}))));
  ASSERT_TRUE(WaitForMetric("attnd_requests_in_flight", 20));
  EXPECT_TRUE(Close(id).ok());
  gate_.Open();
  stream->WritesDone();
  v1::StepResponse response;
  std::set<uint64_t> answered;
  while (stream->Read(&response)) {
    answered.insert(response.request_id());
    if (response.has_status()) {
      EXPECT_EQ(response.status().reason(), "CLOSED");
    }
  }
  EXPECT_EQ(answered.size(), 20u);
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(WaitForMetric("attnd_kv_cache_used_bytes", 0));
}

TEST_F(StepStreamTest, BytesThatAreNoStepEndTheStreamAfterItsAnswers) {
  StartServer();
  RawCall call(NewChannel(), "/attnd.v1.Attention/StepStream", "\xff\xff\xff garbage", /*half_close=*/false);
  const grpc::Status status = call.AwaitStatus();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ReasonOf(status), "MALFORMED");
  EXPECT_TRUE(Eventually([&] { return Handled("StepStream", "INVALID_ARGUMENT") == 1; }));
}

TEST_F(StepStreamTest, ManyStreamsAreCancelledInEveryState) {
  StartServer();
  const std::string id = Create();
  for (int round = 0; round < 50; ++round) {
    grpc::ClientContext context;
    std::unique_ptr<ClientStream> stream = stub_->StepStream(&context);
    for (int i = 0; i < round % 5; ++i) stream->Write(MeanStep(id, {1}));
    v1::StepResponse response;
    if (round % 3 == 1 && round % 5 > 0) stream->Read(&response);
    if (round % 3 == 2) absl::SleepFor(absl::Milliseconds(1));
    context.TryCancel();
    stream->Finish();
  }
  EXPECT_TRUE(WaitForMetric("attnd_streams_active", 0));
  EXPECT_TRUE(WaitForMetric("attnd_requests_in_flight", 0));
}

}  // namespace
}  // namespace attnd::testing

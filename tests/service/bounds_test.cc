// What the server lets in at a time: requests, tokens, bytes, streams. Beyond each bound the refusal names it, says
// when to try again, and costs nobody else anything.
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "tests/service/harness.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;
using ClientStream = grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>;

class BoundsTest : public ServiceTest {
 protected:
  struct Stream {
    grpc::ClientContext context;
    std::unique_ptr<ClientStream> call;
  };
  // A stream that sends nothing.
  std::unique_ptr<Stream> OpenStream() {
    auto stream = std::make_unique<Stream>();
    stream->call = stub_->StepStream(&stream->context);
    return stream;
  }
  static grpc::Status End(Stream* stream) {
    stream->call->WritesDone();
    return stream->call->Finish();
  }
};

TEST_F(BoundsTest, StreamsBeyondTheLimitAreRefusedAndPlacesComeBack) {
  Options options = DefaultOptions();
  options.max_streams = 3;
  StartServer(options);
  EXPECT_EQ(Metric("attnd_streams_limit"), 3);
  const std::string id = Create();
  std::vector<std::unique_ptr<Stream>> open;
  for (int i = 0; i < 3; ++i) open.push_back(OpenStream());
  ASSERT_TRUE(WaitForMetric("attnd_streams_active", 3));
  for (int i = 0; i < 5; ++i) {
    const grpc::Status refused = OpenStream()->call->Finish();
    EXPECT_EQ(refused.error_code(), StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(ReasonOf(refused), "STREAM_LIMIT") << refused.error_message();
    EXPECT_EQ(ErrorInfoOf(refused).metadata().at("limit"), "3");
    EXPECT_TRUE(HasRetryInfo(refused));
  }
  EXPECT_EQ(Mean(id, {2}), Floats({2})) << "unary calls need no place";
  EXPECT_TRUE(WaitForMetric("attnd_streams_active", 3));
  EXPECT_EQ(Metric("attnd_rejected_total{reason=\"STREAM_LIMIT\"}"), 5);

  // One ends well and one is cancelled: both places are free again.
  EXPECT_TRUE(End(open[0].get()).ok());
  open[1]->context.TryCancel();
  EXPECT_EQ(open[1]->call->Finish().error_code(), StatusCode::CANCELLED);
  ASSERT_TRUE(WaitForMetric("attnd_streams_active", 1));
  open[0] = OpenStream();
  open[1] = OpenStream();
  for (const auto& stream : open) {
    v1::StepResponse response;
    ASSERT_TRUE(stream->call->Write(MeanStep(id, {2})));
    ASSERT_TRUE(stream->call->Read(&response));
    EXPECT_EQ(ToFloats(response.out()), Floats({2}));
    EXPECT_TRUE(End(stream.get()).ok());
  }
  EXPECT_TRUE(WaitForMetric("attnd_streams_active", 0));
}

TEST_F(BoundsTest, TheQueueIsBoundedInRequestsAndInTokens) {
  Options options = DefaultOptions();
  options.max_queue_requests = 4;
  options.max_queue_tokens = 20;
  StartServer(options);
  EXPECT_EQ(Metric("attnd_queue_limit"), 4);
  EXPECT_EQ(Metric("attnd_queue_tokens_limit"), 20);
  std::vector<std::string> ids;
  for (int i = 0; i < 6; ++i) ids.push_back(Create());
  gate_.Close();
  std::vector<std::thread> clients;
  const auto step = [&](int session, int tokens) {
    clients.emplace_back([&, session, tokens] { EXPECT_EQ(Mean(ids[session], Floats(tokens, 1)).back(), 1); });
  };
  step(0, 1);  // computed, not queued
  gate_.AwaitBatch();
  step(1, 15);
  ASSERT_TRUE(WaitForMetric("attnd_queue_tokens", 15));
  const grpc::Status tokens = MeanError(ids[5], Floats(6, 1));
  EXPECT_EQ(tokens.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(tokens), "QUEUE_FULL") << tokens.error_message();
  EXPECT_EQ(ErrorInfoOf(tokens).metadata().at("queued_tokens"), "15");
  EXPECT_TRUE(HasRetryInfo(tokens));
  for (int session = 2; session <= 4; ++session) step(session, 1);
  ASSERT_TRUE(WaitForMetric("attnd_queue_depth", 4));
  const grpc::Status requests = MeanError(ids[5], {1});
  EXPECT_EQ(ReasonOf(requests), "QUEUE_FULL") << requests.error_message();
  EXPECT_EQ(ErrorInfoOf(requests).metadata().at("queued_requests"), "4");
  EXPECT_TRUE(HasRetryInfo(requests));
  EXPECT_GT(Metric("attnd_inflight_bytes"), 0);
  EXPECT_LE(Metric("attnd_inflight_bytes"), Metric("attnd_inflight_bytes_limit"));
  gate_.Open();
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(Mean(ids[5], {1}), Floats({1}));
  for (const char* gauge : {"attnd_queue_depth", "attnd_queue_tokens", "attnd_inflight_bytes"}) {
    EXPECT_TRUE(WaitForMetric(gauge, 0)) << gauge;
  }
}

}  // namespace
}  // namespace attnd::testing

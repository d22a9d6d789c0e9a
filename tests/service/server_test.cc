// The server around the service: health, reflection, message limits, drain, tokens, ports.
#include <sys/socket.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/grpc_server.h"
#include "tests/service/harness.h"
#include "tests/service/raw_call.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;

constexpr char kServiceName[] = "attnd.v1.Attention";

class ServerTest : public ServiceTest {
 protected:
  std::string Health(const std::string& service) {
    RawCall call(NewChannel(), kHealthCheck, HealthRequest(service), /*half_close=*/true);
    return call.Message(0);
  }

  // H = Hkv = 8, D = 128: q, k and v are 12,288 bytes a token.
  static v1::SessionConfig LargeConfig() {
    v1::SessionConfig config = MeanConfig();
    config.set_num_q_heads(8);
    config.set_num_kv_heads(8);
    config.set_head_dim(128);
    return config;
  }
  static v1::StepRequest LargeStep(const std::string& id, int tokens) {
    v1::StepRequest request = MeanStep(id, Floats(tokens, 0));
    const Floats values(static_cast<size_t>(tokens) * 8 * 128, 0.5f);
    for (v1::Tensor* tensor : {request.mutable_q(), request.mutable_k(), request.mutable_v()}) *tensor = F32(values);
    return request;
  }
};

TEST_F(ServerTest, HealthAnswersForTheServerAndTheService) {
  StartServer();
  EXPECT_EQ(Health(""), kServing);
  EXPECT_EQ(Health(kServiceName), kServing);
  RawCall unknown(NewChannel(), kHealthCheck, HealthRequest("nobody"), true);
  EXPECT_EQ(unknown.AwaitStatus().error_code(), StatusCode::NOT_FOUND);
}

TEST_F(ServerTest, HealthWatchTellsOfTheDrain) {
  StartServer();
  RawCall watch(NewChannel(), kHealthWatch, HealthRequest(kServiceName), true);
  EXPECT_EQ(watch.Message(0), kServing);
  EXPECT_TRUE(server_->Drain());
  EXPECT_EQ(watch.Message(1), kNotServing);
}

TEST_F(ServerTest, ReflectionListsTheService) {
  StartServer();
  RawCall call(NewChannel(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "\x3a\x01*", false);
  const std::string services = call.Message(0);
  EXPECT_NE(services.find(kServiceName), std::string::npos);
  EXPECT_NE(services.find("grpc.health.v1.Health"), std::string::npos);
}

TEST_F(ServerTest, InfoDescribesTheServer) {
  StartServer();
  const v1::ServerInfo info = Info();
  EXPECT_EQ(info.version(), "0.1.0");
  EXPECT_NE(info.isa(), "");
  EXPECT_NE(info.onednn_version(), "");
  EXPECT_EQ(info.compute_threads(), 2);
  EXPECT_EQ(info.block_tokens(), 64);
  EXPECT_EQ(info.max_message_bytes(), 64 << 20);
  EXPECT_GT(info.kv_cache_capacity_bytes(), 60 << 20);
  EXPECT_LE(info.kv_cache_capacity_bytes(), 64 << 20);
  EXPECT_EQ(info.kernel_paths().size(), 4u);
  EXPECT_FALSE(info.draining());
}

// G01: around gRPC's default limit of 4 MiB, in each direction.
TEST_F(ServerTest, G01_MessagesBeyondFourMebibytes) {
  StartServer();
  for (const int tokens : {341, 342, 1024}) {
    const std::string id = Create(LargeConfig());
    v1::StepResponse response;
    const v1::StepRequest request = LargeStep(id, tokens);
    EXPECT_EQ(request.q().data().size() * 3, static_cast<size_t>(tokens) * 12288);
    const grpc::Status status = Step(request, &response);
    ASSERT_TRUE(status.ok()) << tokens << ": " << status.error_message();
    EXPECT_EQ(response.out().data().size(), static_cast<size_t>(tokens) * 4096);
    EXPECT_EQ(Get(id).length(), tokens);
    EXPECT_TRUE(Close(id).ok());
  }
}

TEST_F(ServerTest, G01_BeyondTheLimitTheErrorIsNotThatOfAFullCache) {
  Options options = DefaultOptions();
  options.max_message_bytes = 8 << 20;
  StartServer(options);
  const std::string id = Create(LargeConfig());
  v1::StepResponse response;
  const grpc::Status status = Step(LargeStep(id, 1024), &response);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_NE(status.error_message().find("message"), std::string::npos) << status.error_message();
  EXPECT_NE(status.error_message().find(absl::StrCat(8 << 20)), std::string::npos) << status.error_message();
  EXPECT_EQ(status.error_message().find("cache"), std::string::npos);
  EXPECT_EQ(Get(id).length(), 0);
  ASSERT_TRUE(Step(LargeStep(id, 512), &response).ok());
}

TEST_F(ServerTest, BytesThatAreNoMessageAreInvalidAndCounted) {
  StartServer();
  RawCall call(NewChannel(), "/attnd.v1.Attention/Step", "\xff\xff\xff garbage", true);
  const grpc::Status status = call.AwaitStatus();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ReasonOf(status), "MALFORMED");
  EXPECT_NE(status.error_message().find("attnd.v1.StepRequest"), std::string::npos);
  EXPECT_TRUE(Eventually([&] { return Handled("Step", "INVALID_ARGUMENT") == 1; }));
}

TEST_F(ServerTest, RequestsThatWaitAreBoundedInBytes) {
  Options options = DefaultOptions();
  options.max_message_bytes = 8 << 20;
  options.max_inflight_bytes = 12 << 20;
  StartServer(options);
  const std::string first = Create(LargeConfig()), second = Create(LargeConfig());
  gate_.Close();
  std::thread holder([&] {
    v1::StepResponse response;
    EXPECT_TRUE(Step(LargeStep(first, 600), &response).ok());
  });
  gate_.AwaitBatch();
  v1::StepResponse response;
  const grpc::Status status = Step(LargeStep(second, 600), &response);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(status), "QUEUE_FULL") << status.error_message();
  EXPECT_TRUE(HasRetryInfo(status));
  gate_.Open();
  holder.join();
  EXPECT_TRUE(Step(LargeStep(second, 600), &response).ok());
}

// G04: an idle stream, a running step, a queued one; then SIGTERM's way.
TEST_F(ServerTest, G04_DrainAnswersWhatRunsAndRefusesWhatComes) {
  StartServer();
  const std::string id = Create(), other = Create();
  grpc::ClientContext idle_context, busy_context;
  auto idle = stub_->StepStream(&idle_context);
  auto busy = stub_->StepStream(&busy_context);
  ASSERT_TRUE(WaitForMetric("attnd_streams_active", 2));
  RawCall watch(NewChannel(), kHealthWatch, HealthRequest(""), true);
  EXPECT_EQ(watch.Message(0), kServing);
  gate_.Close();
  std::thread running([&] { EXPECT_EQ(Mean(id, {5}), Floats({5})); });
  gate_.AwaitBatch();
  ASSERT_TRUE(busy->Write(MeanStep(other, {7})));
  std::thread queued([&] { EXPECT_EQ(Mean(id, {7}), Floats({6})); });
  ASSERT_TRUE(WaitForMetric("attnd_requests_in_flight", 3));

  std::atomic<bool> drained{false};
  const absl::Time start = absl::Now();
  std::thread drainer([&] {
    EXPECT_TRUE(server_->Drain());
    drained.store(true);
  });
  EXPECT_EQ(watch.Message(1), kNotServing);
  EXPECT_EQ(Health(""), kNotServing);
  EXPECT_EQ(Metric("attnd_draining"), 1);
  EXPECT_EQ(Metric("attnd_ready"), 0);
  const grpc::Status refused = MeanError(id, {1});
  EXPECT_EQ(refused.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(ReasonOf(refused), "DRAINING");
  EXPECT_TRUE(Info().draining());
  v1::StepResponse response;
  EXPECT_FALSE(idle->Read(&response));
  const grpc::Status idle_status = idle->Finish();
  EXPECT_EQ(idle_status.error_code(), StatusCode::UNAVAILABLE) << idle_status.error_message();
  EXPECT_EQ(ReasonOf(idle_status), "DRAINING");
  EXPECT_FALSE(drained.load());

  gate_.Open();
  running.join();
  queued.join();
  ASSERT_TRUE(busy->Read(&response));
  EXPECT_EQ(ToFloats(response.out()), Floats({7}));
  EXPECT_FALSE(busy->Read(&response));
  EXPECT_EQ(busy->Finish().error_code(), StatusCode::UNAVAILABLE);
  drainer.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(4));
}

TEST_F(ServerTest, ADrainEndsAtItsTimeout) {
  Options options = DefaultOptions();
  options.drain_timeout = absl::Milliseconds(200);
  StartServer(options);
  const std::string id = Create();
  gate_.Close();
  std::thread running([&] { MeanError(id, {5}); });
  gate_.AwaitBatch();
  std::thread queued([&] {
    const grpc::Status status = MeanError(id, {5});
    EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
  });
  ASSERT_TRUE(WaitForMetric("attnd_requests_in_flight", 2));
  std::thread opener([&] {
    absl::SleepFor(absl::Milliseconds(600));
    gate_.Open();
  });
  const absl::Time start = absl::Now();
  EXPECT_FALSE(server_->Drain());
  EXPECT_LT(absl::Now() - start, absl::Seconds(3));
  opener.join();
  running.join();
  queued.join();
}

TEST_F(ServerTest, ADrainHurriesWhenAsked) {
  Options options = DefaultOptions();
  options.drain_timeout = absl::Seconds(60);
  StartServer(options);
  const std::string id = Create();
  gate_.Close();
  std::thread running([&] { MeanError(id, {5}); });
  gate_.AwaitBatch();
  const absl::Time start = absl::Now();
  std::thread hurrier([&] {
    absl::SleepFor(absl::Milliseconds(200));
    server_->Hurry();
    absl::SleepFor(absl::Milliseconds(200));
    gate_.Open();
  });
  EXPECT_FALSE(server_->Drain());
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  hurrier.join();
  running.join();
}

TEST_F(ServerTest, G08_HealthAndScrapesDoNotWaitForCompute) {
  StartServer();
  const std::string id = Create();
  gate_.Close();
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>>> streams;
  for (int i = 0; i < 64; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(stub_->StepStream(contexts.back().get()));
    ASSERT_TRUE(streams.back()->Write(MeanStep(id, {1})));
  }
  ASSERT_TRUE(WaitForMetric("attnd_requests_in_flight", 64));
  RawCall warm(NewChannel(), kHealthCheck, HealthRequest(""), true);
  EXPECT_EQ(warm.Message(0), kServing);
  for (int i = 0; i < 10; ++i) {
    const absl::Time start = absl::Now();
    EXPECT_EQ(Health(""), kServing);
    EXPECT_EQ(Metric("attnd_streams_active"), 64);
    EXPECT_EQ(Info().sessions_active(), 1);
    EXPECT_LT(absl::Now() - start, absl::Milliseconds(500));  // 100 ms with room for a loaded machine and sanitizers
  }
  gate_.Open();
  for (auto& stream : streams) {
    v1::StepResponse response;
    EXPECT_TRUE(stream->Read(&response));
    stream->WritesDone();
    EXPECT_TRUE(stream->Finish().ok());
  }
  EXPECT_EQ(Get(id).length(), 64);
}

TEST_F(ServerTest, G07_IdleStreamsTakeNothingFromOthers) {
  StartServer();
  const std::string id = Create();
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
    std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>>> streams;
    for (int i = 0; i < 300; ++i) {
      contexts.push_back(std::make_unique<grpc::ClientContext>());
      streams.push_back(stub_->StepStream(contexts.back().get()));
    }
    EXPECT_TRUE(WaitForMetric("attnd_streams_active", 300));
    EXPECT_EQ(Mean(id, {2}), Floats({2}));
    EXPECT_EQ(Health(""), kServing);
    for (auto& stream : streams) {
      stream->WritesDone();
      EXPECT_TRUE(stream->Finish().ok());
    }
    EXPECT_TRUE(WaitForMetric("attnd_streams_active", 0));
  }
}

TEST_F(ServerTest, TokensAreAskedForWhenThereIsAFileOfThem) {
  const std::string path = ::testing::TempDir() + "/attnd_tokens";
  std::ofstream(path) << "# who may come in\n\ncorrect-horse-battery-staple\nanother-token-0123456789\n";
  Options options = DefaultOptions();
  options.auth_tokens_file = path;
  StartServer(options);
  const auto info = [&](const char* header) {
    grpc::ClientContext context;
    if (header != nullptr) context.AddMetadata("authorization", header);
    v1::ServerInfo response;
    return stub_->GetServerInfo(&context, v1::GetServerInfoRequest(), &response);
  };
  EXPECT_EQ(info(nullptr).error_code(), StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(ReasonOf(info(nullptr)), "TOKEN_MISSING");
  EXPECT_EQ(ReasonOf(info("Basic abc")), "TOKEN_MISSING");
  EXPECT_EQ(ReasonOf(info("Bearer wrong-horse-battery-staple")), "TOKEN_UNKNOWN");
  EXPECT_EQ(ReasonOf(info("Bearer correct-horse-battery-stapl")), "TOKEN_UNKNOWN");
  EXPECT_TRUE(info("Bearer correct-horse-battery-staple").ok());
  EXPECT_TRUE(info("bearer another-token-0123456789").ok());
  EXPECT_EQ(Health(""), kServing) << "probes need no secret";
  grpc::ClientContext context;
  EXPECT_EQ(stub_->StepStream(&context)->Finish().error_code(), StatusCode::UNAUTHENTICATED);
}

TEST_F(ServerTest, PortsThatCannotBeBoundAreNamed) {
  StartServer();
  Options taken = DefaultOptions();
  taken.listen = server_->address();
  const auto second = Server::Start(taken);
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find(server_->address()), absl::string_view::npos) << second.status();

  Options metrics_taken = DefaultOptions();
  metrics_taken.metrics_listen = server_->address();
  const auto third = Server::Start(metrics_taken);
  ASSERT_FALSE(third.ok());
  EXPECT_NE(third.status().message().find("--metrics_listen"), absl::string_view::npos) << third.status();
  EXPECT_NE(third.status().message().find(server_->address()), absl::string_view::npos) << third.status();
  EXPECT_EQ(Health(""), kServing);
}

}  // namespace
}  // namespace attnd::testing

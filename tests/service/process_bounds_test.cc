// The program under those who ask too much of it, measured from outside: its memory, files, threads and CPU time.
//
// The full sizes of the scenarios are run where ATTND_TEST_FULL is set; by default they are as small as still shows the
// failure.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/service/harness.h"
#include "tests/service/http_get.h"
#include "tests/service/program.h"
#include "tests/service/raw_call.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;
using ClientStream = grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>;

// AddressSanitizer keeps freed memory for a while.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kMemoryIsMeasurable = false;
#else
constexpr bool kMemoryIsMeasurable = true;
#endif

constexpr int64_t kMiB = 1 << 20;

bool FullSize() { return std::getenv("ATTND_TEST_FULL") != nullptr; }

class ProcessBoundsTest : public ::testing::Test {
 protected:
  void Start(const std::vector<std::string>& arguments = {}, int open_files = 0) {
    program_ = Program::Serving(arguments, open_files);
    channel_ = program_->NewChannel();
    stub_ = v1::Attention::NewStub(channel_);
  }
  std::string Create(const v1::SessionConfig& config = ServiceTest::MeanConfig()) {
    return testing::Create(stub_.get(), config);
  }
  Floats Mean(const std::string& id, const Floats& values) {
    v1::StepResponse response;
    const grpc::Status status = Step(stub_.get(), MeanStep(id, values), &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return ToFloats(response.out());
  }
  static std::string Health(const std::shared_ptr<grpc::Channel>& channel) {
    RawCall call(channel, kHealthCheck, HealthRequest(""), /*half_close=*/true);
    return call.Message(0);
  }
  bool GaugesReturnToZero() {
    return Eventually([&] {
      const std::map<std::string, double> values = program_->Metrics();
      for (const char* gauge : {"attnd_requests_in_flight", "attnd_streams_active", "attnd_queue_depth",
                                "attnd_queue_tokens", "attnd_inflight_bytes"}) {
        const auto found = values.find(gauge);
        if (found == values.end() || found->second != 0) return false;
      }
      return true;
    });
  }

  std::unique_ptr<Program> program_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Attention::Stub> stub_;
};

// gRPC's own listener never answers again after the first accept() that finds no descriptor.
TEST_F(ProcessBoundsTest, G07_AFloodOfConnectionsLeavesTheOthersAloneAndTheServerRecovers) {
  Start({}, /*open_files=*/256);
  const std::string id = Create();
  for (int round = 0; round < 2; ++round) {
    std::vector<int> flood;
    for (int i = 0; i < 400; ++i) flood.push_back(HttpConnect(program_->address));
    ASSERT_TRUE(Eventually([&] { return program_->Metrics()["attnd_connections_refused_total"] >= 200 * (round + 1); }))
        << program_->Metrics()["attnd_connections_refused_total"];
    EXPECT_LE(program_->OpenFiles(), 256);
    EXPECT_EQ(Mean(id, {2}), Floats({2})) << "connections that exist are served";
    EXPECT_EQ(Health(channel_), kServing);
    // The descriptors of scrapes, which are free again, are places for connections too.
    for (int i = 0; i < 16; ++i) flood.push_back(HttpConnect(program_->address));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    v1::ServerInfo info;
    const auto late = v1::Attention::NewStub(program_->NewChannel());
    EXPECT_EQ(late->GetServerInfo(&context, v1::GetServerInfoRequest(), &info).error_code(), StatusCode::UNAVAILABLE);
    for (const int connection : flood) close(connection);
    ASSERT_TRUE(Eventually([&] { return program_->OpenFiles() < 64; })) << program_->OpenFiles();
    EXPECT_EQ(Health(program_->NewChannel()), kServing) << "new ones are served again";
  }
  program_->Signal(SIGTERM);
  EXPECT_EQ(program_->Wait(), 0);
}

TEST_F(ProcessBoundsTest, G07_IdleStreamsBeyondTheirLimitAreRefusedAndHealthAnswersThroughout) {
  Start({"--max_streams=100"}, /*open_files=*/256);
  const std::string id = Create();
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
    std::vector<std::unique_ptr<ClientStream>> streams;
    for (int i = 0; i < 200; ++i) {
      contexts.push_back(std::make_unique<grpc::ClientContext>());
      streams.push_back(stub_->StepStream(contexts.back().get()));
    }
    ASSERT_TRUE(Eventually([&] {
      const std::map<std::string, double> values = program_->Metrics();
      return values.at("attnd_streams_active") == 100 &&
             values.at("attnd_rejected_total{reason=\"STREAM_LIMIT\"}") == 100 * (round + 1);
    }));
    EXPECT_EQ(Mean(id, {2}), Floats({2}));
    EXPECT_EQ(Health(channel_), kServing);
    EXPECT_LT(program_->Threads(), 60) << "a stream takes no thread";
    int refused = 0;
    for (auto& stream : streams) {
      stream->WritesDone();
      const grpc::Status status = stream->Finish();
      if (status.ok()) continue;
      EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
      ++refused;
    }
    EXPECT_EQ(refused, 100);
    EXPECT_TRUE(GaugesReturnToZero());
  }
}

// Each takes a thread in gRPC.
TEST_F(ProcessBoundsTest, IdleReflectionStreamsAreBounded) {
  Start();
  constexpr char kReflection[] = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  const std::string list_services = "\x3a\x01*";
  const int before = program_->Threads();
  for (int round = 0; round < 2; ++round) {
    std::vector<std::unique_ptr<RawCall>> calls;
    for (int i = 0; i < 100; ++i) {
      calls.push_back(std::make_unique<RawCall>(channel_, kReflection, list_services, /*half_close=*/false));
    }
    int served = 0;
    for (const auto& call : calls) {
      if (!call->Message(0).empty()) {
        ++served;  // and stays open
      } else {
        EXPECT_EQ(call->AwaitStatus().error_code(), StatusCode::RESOURCE_EXHAUSTED);
      }
    }
    EXPECT_GT(served, 10);
    EXPECT_LT(served, 40);
    EXPECT_LT(program_->Threads(), before + 50);
    EXPECT_EQ(Health(channel_), kServing);
    calls.clear();
    EXPECT_TRUE(Eventually([&] {
      RawCall call(channel_, kReflection, list_services, /*half_close=*/true);
      return !call.Message(0).empty();
    })) << "there is room again";
  }
}

TEST_F(ProcessBoundsTest, AnIdleServerTakesNoProcessorTime) {
  Start();
  const absl::Duration period = absl::Seconds(FullSize() ? 20 : 5);
  const auto idle_share = [&] {
    const double before = program_->CpuSeconds();
    absl::SleepFor(period);
    return (program_->CpuSeconds() - before) / absl::ToDoubleSeconds(period);
  };
  const std::string id = Create();
  Mean(id, {1});  // every thread that there will be has run
  absl::SleepFor(absl::Milliseconds(500));
  EXPECT_LT(idle_share(), 0.01) << "with one session";
  for (int i = 0; i < 1000; ++i) Mean(Create(), {1});
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<ClientStream>> streams;
  v1::StepResponse response;
  for (int i = 0; i < 64; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(stub_->StepStream(contexts.back().get()));
    ASSERT_TRUE(streams.back()->Write(MeanStep(id, {1})));
    ASSERT_TRUE(streams.back()->Read(&response));
  }
  absl::SleepFor(absl::Milliseconds(500));
  EXPECT_LT(idle_share(), 0.01) << "with 1001 sessions and 64 streams";
  for (auto& stream : streams) stream->WritesDone();
  for (auto& stream : streams) EXPECT_TRUE(stream->Finish().ok());
}

// The answers of these steps are 256 times as large as their requests: 1024 query heads of 1 dimension, values of 256.
TEST_F(ProcessBoundsTest, ClientsThatDoNotReadCannotGrowItsMemory) {
  Start({"--max_inflight_bytes=128MiB", "--max_message_bytes=32MiB"});
  v1::SessionConfig config = ServiceTest::MeanConfig();
  config.set_num_q_heads(1024);
  config.set_value_dim(256);
  const std::string id = Create(config);
  v1::StepRequest append;
  append.add_segments()->set_session_id(id);
  append.mutable_segments(0)->set_num_tokens(1);
  *append.mutable_k() = F32({0});
  *append.mutable_v() = F32(Floats(256, 1));
  v1::StepResponse response;
  ASSERT_TRUE(Step(stub_.get(), append, &response).ok());
  v1::StepRequest attend;
  attend.add_segments()->set_session_id(id);
  attend.mutable_segments(0)->set_num_tokens(1);
  *attend.mutable_q() = F32(Floats(1024, 0));
  ASSERT_TRUE(Step(stub_.get(), attend, &response).ok());
  ASSERT_EQ(response.out().data().size(), size_t{1} << 20);

  const int64_t before = program_->ResidentBytes();
  constexpr int kStreams = 32;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<v1::Attention::Stub>> stubs;
  std::vector<std::unique_ptr<ClientStream>> streams;
  for (int i = 0; i < kStreams; ++i) {
    stubs.push_back(v1::Attention::NewStub(program_->NewChannel()));
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    streams.push_back(stubs.back()->StepStream(contexts.back().get()));
    for (int step = 0; step < 60; ++step) ASSERT_TRUE(streams.back()->Write(attend));
  }
  // Nearly 2 GiB of answers were asked for. A little each is on the way to its client; the server holds no more than it
  // was allowed, and its serializations: each answer's copy while it is being made.
  const auto in_flight = [&] { return program_->Metrics()["attnd_inflight_bytes"]; };
  EXPECT_TRUE(Eventually([&] { return in_flight() > 64 * kMiB; })) << in_flight();
  int64_t most = 0;
  for (int i = 0; i < 20; ++i) {
    EXPECT_LE(in_flight(), 128 * kMiB);
    most = std::max(most, program_->ResidentBytes() - before);
    absl::SleepFor(absl::Milliseconds(50));
  }
  if (kMemoryIsMeasurable) {
    EXPECT_LT(most, 256 * kMiB);
  }
  EXPECT_EQ(Health(channel_), kServing);
  for (const auto& context : contexts) context->TryCancel();
  for (const auto& stream : streams) stream->Finish();
  EXPECT_TRUE(GaugesReturnToZero());
  EXPECT_TRUE(Step(stub_.get(), attend, &response).ok());
}

// G06: many more requests than it may hold, while compute is far behind.
TEST_F(ProcessBoundsTest, G06_RequestsBeyondTheMemoryForThemAreRefused) {
  Start({"--max_inflight_bytes=32MiB", "--max_message_bytes=8MiB", "--compute_threads=1"});
  const int clients = FullSize() ? 500 : 100;
  v1::SessionConfig config = ServiceTest::MeanConfig();
  config.set_head_dim(256);
  std::vector<std::string> ids;
  for (int i = 0; i < clients; ++i) ids.push_back(Create(config));
  v1::StepRequest step = MeanStep("", Floats(340, 0));
  for (v1::Tensor* tensor : {step.mutable_q(), step.mutable_k(), step.mutable_v()}) *tensor = F32(Floats(340 * 256, 1));
  ASSERT_GT(step.ByteSizeLong(), size_t{1'000'000});
  const int64_t before = program_->ResidentBytes();
  std::atomic<int> refused{0}, answered{0}, alive{clients};
  std::vector<std::thread> threads;
  for (const std::string& id : ids) {
    threads.emplace_back([&, id] {
      // A connection that cannot be made in time is not what this is about.
      const auto channel = program_->NewChannel();
      EXPECT_TRUE(channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(30)));
      const auto stub = v1::Attention::NewStub(channel);
      v1::StepRequest request = step;
      request.mutable_segments(0)->set_session_id(id);
      request.mutable_segments(0)->set_start_position(0);
      request.mutable_segments(0)->set_rewind(true);
      for (int i = 0; i < 5; ++i) {
        v1::StepResponse response;
        const grpc::Status status = Step(stub.get(), request, &response);
        if (status.ok()) {
          ++answered;
        } else {
          EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
          ++refused;
        }
      }
      --alive;
    });
  }
  int64_t most = 0;
  while (alive > 0) {
    most = std::max(most, program_->ResidentBytes() - before);
    absl::SleepFor(absl::Milliseconds(10));
  }
  for (std::thread& thread : threads) thread.join();
  std::printf("%d answered, %d refused, at most %.0f MiB more\n", answered.load(), refused.load(), most / 1048576.0);
  EXPECT_EQ(refused + answered, 5 * clients);
  EXPECT_GT(answered, 0);
  EXPECT_GT(refused, 0);
  // The cache's 64 MiB; the 32 MiB that were allowed; and what gRPC holds of messages on their way in and out, which is
  // bounded by twice as much.
  if (kMemoryIsMeasurable) {
    EXPECT_LT(most, (64 + 3 * 32 + 64) * kMiB);
  }
  EXPECT_TRUE(GaugesReturnToZero());
}

// G15: cycles of many sessions that fill the cache and are closed.
TEST_F(ProcessBoundsTest, G15_CyclesOfSessionsGiveEverythingBack) {
  const int cycles = FullSize() ? 100 : 12, sessions = FullSize() ? 1000 : 60;
  Start({FullSize() ? "--kv_cache_bytes=2GiB" : "--kv_cache_bytes=128MiB"});
  // 64 tokens of 8 heads of 128 + 128 floats in 2 layers: 1 MiB.
  v1::SessionConfig config = ServiceTest::MeanConfig(2);
  config.set_num_q_heads(8);
  config.set_num_kv_heads(8);
  config.set_head_dim(128);
  v1::StepRequest append;
  append.add_segments()->set_num_tokens(64);
  append.mutable_k()->set_dtype(v1::DTYPE_F16);
  append.mutable_k()->mutable_data()->assign(64 * 8 * 128 * 2, '\0');
  *append.mutable_v() = append.k();
  int64_t early = 0, late = 0;
  for (int cycle = 1; cycle <= cycles; ++cycle) {
    std::vector<std::string> ids;
    for (int i = 0; i < sessions; ++i) {
      ids.push_back(Create(config));
      append.mutable_segments(0)->set_session_id(ids.back());
      for (int layer = 0; layer < 2; ++layer) {
        append.set_layer(layer);
        v1::StepResponse response;
        const grpc::Status status = Step(stub_.get(), append, &response);
        ASSERT_TRUE(status.ok()) << status.error_message();
      }
    }
    EXPECT_GE(program_->Metrics()["attnd_kv_cache_used_bytes"], static_cast<double>(sessions * kMiB));
    for (const std::string& id : ids) {
      grpc::ClientContext context;
      v1::CloseSessionRequest request;
      request.set_session_id(id);
      v1::CloseSessionResponse response;
      ASSERT_TRUE(stub_->CloseSession(&context, request, &response).ok());
    }
    ASSERT_EQ(program_->Metrics()["attnd_kv_cache_used_bytes"], 0);
    late = program_->ResidentBytes();
    if (cycle == 5) early = late;
  }
  std::printf("resident %.1f MiB after cycle 5, %.1f MiB after cycle %d\n", early / 1048576.0, late / 1048576.0,
              cycles);
  if (kMemoryIsMeasurable) {
    EXPECT_LT(static_cast<double>(late), 1.2 * static_cast<double>(early));
  }
}

}  // namespace
}  // namespace attnd::testing

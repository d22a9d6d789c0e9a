// The program's end and its neighbours: signals, rolling updates, several instances, probes of a busy one.
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/service/harness.h"
#include "tests/service/program.h"
#include "tests/service/raw_call.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;
using ClientStream = grpc::ClientReaderWriter<v1::StepRequest, v1::StepResponse>;

int64_t Length(v1::Attention::Stub* stub, const std::string& id) {
  grpc::ClientContext context;
  v1::GetSessionRequest request;
  request.set_session_id(id);
  v1::Session session;
  EXPECT_TRUE(stub->GetSession(&context, request, &session).ok());
  return session.length();
}

// Ten milliseconds and more of compute for a quarter of a megabyte: all of a stream's fit into what may be in flight.
v1::SessionConfig HeavyConfig() {
  v1::SessionConfig config = ServiceTest::MeanConfig();
  config.set_num_q_heads(32);
  return config;
}
v1::StepRequest HeavyStep(const std::string& id) {
  constexpr int kTokens = 1024;
  v1::StepRequest request = MeanStep(id, Floats(kTokens, 0));
  request.mutable_segments(0)->set_start_position(0);
  request.mutable_segments(0)->set_rewind(true);
  *request.mutable_q() = F32(Floats(kTokens * 32, 0.5f));
  return request;
}

// A stream with nothing to do, one whose steps are computed, and a unary call behind them in the queue.
class DrainTest : public ::testing::Test {
 protected:
  static constexpr int kSteps = 60;

  void Start(const std::string& drain_timeout) {
    program_ = Program::Serving({"--drain_timeout=" + drain_timeout, "--compute_threads=1", "--max_queue_delay=inf",
                                 "--prefill_chunk_time=inf", "--max_queue_tokens=1000000"});
    channel_ = program_->NewChannel();
    stub_ = v1::Attention::NewStub(channel_);
    idle_ = stub_->StepStream(&idle_context_);
    busy_ = stub_->StepStream(&busy_context_);
    const std::string id = Create(stub_.get(), HeavyConfig());
    const v1::StepRequest step = HeavyStep(id);
    for (int i = 0; i < kSteps; ++i) ASSERT_TRUE(busy_->Write(step));
    ASSERT_TRUE(Eventually([&] { return program_->Metrics()["attnd_requests_in_flight"] > kSteps - 8; }));
    unary_ = std::thread([this, step] {
      v1::StepResponse response;
      unary_status_ = Step(stub_.get(), step, &response);
    });
    v1::StepResponse response;
    ASSERT_TRUE(busy_->Read(&response));
  }
  // How many answers the busy stream still gets.
  int ReadAnswers() {
    int answers = 0;
    v1::StepResponse response;
    while (busy_->Read(&response)) answers += !response.has_status();
    busy_status_ = busy_->Finish();
    unary_.join();
    return answers;
  }
  // Of a drain that began at `start` and does not wait for what is there.
  void ExpectCutOff(absl::Time start) {
    EXPECT_LT(ReadAnswers(), kSteps - 1);
    EXPECT_EQ(unary_status_.error_code(), StatusCode::UNAVAILABLE) << unary_status_.error_message();
    EXPECT_EQ(idle_->Finish().error_code(), StatusCode::UNAVAILABLE);
    EXPECT_EQ(program_->Wait(), 0);
    EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  }

  std::unique_ptr<Program> program_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Attention::Stub> stub_;
  grpc::ClientContext idle_context_, busy_context_;
  std::unique_ptr<ClientStream> idle_, busy_;
  std::thread unary_;
  grpc::Status unary_status_, busy_status_;
};

TEST_F(DrainTest, G04_SigtermAnswersWhatIsThereRefusesWhatComesAndEndsWithZero) {
  Start("300s");  // sanitized builds need more than a minute for the steps that are there
  RawCall watch(channel_, kHealthWatch, HealthRequest(""), true);
  EXPECT_EQ(watch.Message(0), kServing);
  program_->Signal(SIGTERM);
  EXPECT_EQ(watch.Message(1), kNotServing);
  v1::StepResponse response;
  EXPECT_FALSE(idle_->Read(&response));
  const grpc::Status idle = idle_->Finish();
  EXPECT_EQ(idle.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(ReasonOf(idle), "DRAINING") << idle.error_message();
  grpc::ClientContext context;
  v1::Session session;
  const grpc::Status refused = stub_->CreateSession(&context, v1::CreateSessionRequest(), &session);
  EXPECT_EQ(refused.error_code(), StatusCode::UNAVAILABLE) << refused.error_message();
  EXPECT_EQ(ReadAnswers(), kSteps - 1);
  EXPECT_EQ(ReasonOf(busy_status_), "DRAINING") << busy_status_.error_message();
  EXPECT_TRUE(unary_status_.ok()) << unary_status_.error_message();
  EXPECT_EQ(program_->Wait(), 0);
  EXPECT_TRUE(absl::StrContains(program_->err(), "every call was answered")) << program_->err();
}

TEST_F(DrainTest, G04_TheDrainLimitCutsOffWhatIsLeft) {
  Start("200ms");
  const absl::Time start = absl::Now();
  program_->Signal(SIGTERM);
  ExpectCutOff(start);
  EXPECT_TRUE(absl::StrContains(program_->err(), "cut off")) << program_->err();
}

TEST_F(DrainTest, G04_ASecondSigtermHurries) {
  Start("60s");
  const absl::Time start = absl::Now();
  program_->Signal(SIGTERM);
  ASSERT_TRUE(Eventually([&] { return absl::StrContains(program_->err(), "draining"); }));
  program_->Signal(SIGTERM);
  ExpectCutOff(start);
}

// One client of the rolling update: a session of values 1, 2, 3, ... whose every answer must be their mean.
class RollingClient {
 public:
  explicit RollingClient(std::unique_ptr<v1::Attention::Stub> stub) : stub_(std::move(stub)) {
    id_ = Create(stub_.get());
  }
  // Steps over one stream until it ends; how it ended.
  grpc::Status RunUntilItEnds() {
    grpc::ClientContext context;
    const auto stream = stub_->StepStream(&context);
    v1::StepResponse response;
    for (;;) {
      const int next = answered_ + 1;
      v1::StepRequest request = MeanStep(id_, {static_cast<float>(next)});
      request.mutable_segments(0)->set_start_position(answered_);
      if (!stream->Write(request) || !stream->Read(&response)) return stream->Finish();
      if (response.has_status()) {  // read just after the drain began: nothing was appended, and the stream ends
        EXPECT_EQ(response.status().reason(), "DRAINING") << response.status().message();
        EXPECT_FALSE(stream->Read(&response));
        return stream->Finish();
      }
      EXPECT_NEAR(ToFloats(response.out())[0], (1 + next) / 2.0, 1e-3);
      EXPECT_EQ(response.segments(0).length(), next);
      answered_ = next;
    }
  }
  // A new session on another instance, with all tokens that were answered; then one more step.
  void ReplayOn(std::unique_ptr<v1::Attention::Stub> stub) {
    v1::StepResponse response;
    const grpc::Status lost = Step(stub.get(), MeanStep(id_, {1}), &response);
    EXPECT_EQ(lost.error_code(), StatusCode::NOT_FOUND) << "the old id is not made anew silently";
    EXPECT_EQ(ReasonOf(lost), "NEVER_EXISTED");
    stub_ = std::move(stub);
    id_ = Create(stub_.get());
    Floats values;
    for (int i = 1; i <= answered_; ++i) values.push_back(static_cast<float>(i));
    ASSERT_GT(answered_, 0);
    ASSERT_TRUE(Step(stub_.get(), MeanStep(id_, values), &response).ok());
    const int next = ++answered_;
    ASSERT_TRUE(Step(stub_.get(), MeanStep(id_, {static_cast<float>(next)}), &response).ok());
    EXPECT_NEAR(ToFloats(response.out())[0], (1 + next) / 2.0, 1e-3);
    EXPECT_EQ(Length(stub_.get(), id_), next) << "nothing was appended twice";
  }

 private:
  std::unique_ptr<v1::Attention::Stub> stub_;
  std::string id_;
  int answered_ = 0;
};

TEST(LifetimeTest, O04_ARollingUpdateLosesNoTokenOfAClientThatReplays) {
  const auto before = Program::Serving();
  std::vector<std::unique_ptr<RollingClient>> clients;
  for (int i = 0; i < 20; ++i) {
    clients.push_back(std::make_unique<RollingClient>(v1::Attention::NewStub(before->NewChannel())));
  }
  std::unique_ptr<Program> after;
  std::atomic<bool> replaced{false};
  std::vector<std::thread> threads;
  for (auto& client : clients) {
    threads.emplace_back([&] {
      const grpc::Status status = client->RunUntilItEnds();
      EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
      EXPECT_EQ(ReasonOf(status), "DRAINING") << status.error_message();
      while (!replaced) absl::SleepFor(absl::Milliseconds(10));
      client->ReplayOn(v1::Attention::NewStub(after->NewChannel()));
    });
  }
  ASSERT_TRUE(Eventually([&] { return before->Metrics()["attnd_streams_active"] == 20; }));
  absl::SleepFor(absl::Milliseconds(300));
  before->Signal(SIGTERM);
  after = Program::Serving();
  replaced = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(before->Wait(), 0);
  EXPECT_TRUE(absl::StrContains(before->err(), "every call was answered")) << before->err();
}

TEST(LifetimeTest, O06_AnotherInstanceSaysNotFoundAndNeverMakesASession) {
  const auto first = Program::Serving(), second = Program::Serving();
  grpc::ChannelArguments arguments;
  arguments.SetLoadBalancingPolicyName("round_robin");
  const auto channel = grpc::CreateCustomChannel(absl::StrCat("ipv4:", first->address, ",", second->address),
                                                 grpc::InsecureChannelCredentials(), arguments);
  ASSERT_TRUE(channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(10)));
  const auto stub = v1::Attention::NewStub(channel);
  ASSERT_TRUE(Eventually([&] {  // until both take part
    grpc::ClientContext context;
    v1::ServerInfo info;
    EXPECT_TRUE(stub->GetServerInfo(&context, v1::GetServerInfoRequest(), &info).ok());
    const auto calls = [](const Program& program) {
      return program.Metrics()["attnd_rpc_handled_total{code=\"OK\",method=\"GetServerInfo\"}"];
    };
    return calls(*first) > 0 && calls(*second) > 0;
  }));
  int found = 0, missing = 0;
  for (int session = 0; session < 10; ++session) {
    const std::string id = Create(stub.get());
    int appended = 0;
    for (int i = 0; i < 10; ++i) {
      v1::StepResponse response;
      const grpc::Status status = Step(stub.get(), MeanStep(id, {static_cast<float>(appended + 1)}), &response);
      if (status.ok()) {
        ++appended;
        ++found;
        EXPECT_NEAR(ToFloats(response.out())[0], (appended + 1) / 2.0, 1e-4);
      } else {
        ++missing;
        EXPECT_EQ(status.error_code(), StatusCode::NOT_FOUND) << status.error_message();
        EXPECT_EQ(ReasonOf(status), "NEVER_EXISTED");
      }
    }
  }
  EXPECT_GT(found, 20);
  EXPECT_GT(missing, 20);
  EXPECT_EQ(first->Metrics()["attnd_sessions_active"] + second->Metrics()["attnd_sessions_active"], 10);
}

TEST(LifetimeTest, O09_ABusyServerAnswersItsProbes) {
  const auto program = Program::Serving({"--max_queue_delay=inf"});
  std::atomic<bool> stop{false};
  std::vector<std::thread> clients;
  for (int i = 0; i < 4; ++i) {
    clients.emplace_back([&] {
      const auto stub = v1::Attention::NewStub(program->NewChannel());
      const std::string id = Create(stub.get(), HeavyConfig());
      const v1::StepRequest step = HeavyStep(id);
      v1::StepResponse response;
      while (!stop) EXPECT_TRUE(Step(stub.get(), step, &response).ok());
    });
  }
  const auto channel = program->NewChannel();
  const absl::Time end = absl::Now() + absl::Seconds(std::getenv("ATTND_TEST_FULL") != nullptr ? 60 : 4);
  std::vector<absl::Duration> latencies;
  while (absl::Now() < end) {
    const absl::Time start = absl::Now();
    RawCall call(channel, kHealthCheck, HealthRequest(""), true);
    ASSERT_EQ(call.Message(0), kServing);
    latencies.push_back(absl::Now() - start);
    EXPECT_LT(latencies.back(), absl::Seconds(1)) << "a probe's usual time limit";
    absl::SleepFor(absl::Milliseconds(50));
  }
  const double computed = program->CpuSeconds();
  stop = true;
  for (std::thread& client : clients) client.join();
  EXPECT_GT(computed, 1) << "it was busy";
  std::sort(latencies.begin(), latencies.end());
  // A loaded machine may hold up one probe; not one in ten.
  EXPECT_LT(latencies[latencies.size() * 9 / 10], absl::Milliseconds(100));
  std::printf("%zu probes: median %s, p90 %s, max %s\n", latencies.size(),
              absl::FormatDuration(latencies[latencies.size() / 2]).c_str(),
              absl::FormatDuration(latencies[latencies.size() * 9 / 10]).c_str(),
              absl::FormatDuration(latencies.back()).c_str());
}

}  // namespace
}  // namespace attnd::testing

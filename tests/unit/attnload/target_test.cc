// Connections and streams, against the client's stand-in server.
#include "client/attnload/target.h"

#include <gtest/gtest.h>

#include <future>

#include "tests/unit/client/fake_server.h"

namespace attnd::attnload {
namespace {

using Answer = std::pair<absl::StatusOr<client::StepResult>, CallTimes>;

struct TargetTest : ::testing::Test {
  TargetTest() : executor(2) {}
  ~TargetTest() override {
    executor.Stop();
    target.reset();
  }

  void Connect(TargetOptions options, absl::Duration timeout = absl::Seconds(20)) {
    options.client.target = server.target();
    options.client.default_timeout = timeout;
    target = *Target::Connect(options, &executor);
    session_id = CreateSession();
    ASSERT_NE(session_id, "");
  }

  std::string CreateSession() {
    std::promise<std::string> created;
    target->Create(0, {.num_layers = 1, .num_q_heads = 1, .num_kv_heads = 1, .head_dim = 1},
                   [&](absl::StatusOr<std::string> id, CallTimes) { created.set_value(id.ok() ? *id : ""); });
    return created.get_future().get();
  }

  client::StepRequest Request() const {
    client::StepRequest request;
    request.segments.push_back({.session_id = session_id, .num_tokens = 1});
    request.q = request.k = request.v = one;
    return request;
  }

  std::future<Answer> Step(const client::StepRequest& request, std::stop_token stop = {}) {
    auto answer = std::make_shared<std::promise<Answer>>();
    target->Step(0, request, stop.stop_possible(), stop,
                 [answer](absl::StatusOr<client::StepResult> result, CallTimes times) {
                   answer->set_value({std::move(result), times});
                 });
    return answer->get_future();
  }

  const std::vector<float> one = {1.0f};
  FakeServer server;
  Executor executor;
  std::unique_ptr<Target> target;
  std::string session_id;
};

TEST_F(TargetTest, BothWaysAnswerAndSayWhenTheyWereSent) {
  for (const int streams : {0, 2}) {
    Connect({.client = {}, .connections = 2, .streams = streams});
    const client::StepRequest request = Request();
    server.faults().delay_ms = 50;
    const TimePoint before = Clock::now();
    const auto [result, times] = Step(request).get();
    server.faults().delay_ms = 0;
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->out.As<float>()[0], 1.0f);
    EXPECT_GE(times.sent, before);
    EXPECT_GE(times.answered - times.sent, std::chrono::milliseconds(45));
  }
}

// What is beyond the limit has not been sent, and its wait is not the server's.
TEST_F(TargetTest, ALimitedConnectionSendsTheNextCallWhenOneIsBack) {
  Connect({.client = {}, .calls_per_connection = 1});
  const client::StepRequest request = Request();
  server.faults().delay_ms = 60;
  std::future<Answer> first = Step(request), second = Step(request);
  const CallTimes a = first.get().second, b = second.get().second;
  EXPECT_GE(b.sent, a.answered);
}

TEST_F(TargetTest, AStopCancelsAUnaryStep) {
  Connect({});
  const client::StepRequest request = Request();
  server.faults().delay_ms = 200;
  std::stop_source stop;
  std::future<Answer> answer = Step(request, stop.get_token());
  stop.request_stop();
  EXPECT_TRUE(absl::IsCancelled(answer.get().first.status()));
}

TEST_F(TargetTest, AStreamThatMissesItsDeadlineIsReplaced) {
  Connect({.client = {}, .streams = 1}, absl::Milliseconds(300));
  const client::StepRequest request = Request();
  server.faults().delay_ms = 800;
  const absl::Status late = Step(request).get().first.status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
  server.faults().delay_ms = 0;
  EXPECT_TRUE(Step(request).get().first.ok());
}

TEST_F(TargetTest, AStreamIsOpenedAnewAfterTheServerWasAway) {
  Connect({.client = {}, .streams = 1});
  const client::StepRequest before = Request();
  ASSERT_TRUE(Step(before).get().first.ok());
  server.Stop();
  EXPECT_FALSE(Step(before).get().first.ok());
  server.Restart();
  // gRPC waits before it connects again.
  session_id.clear();
  for (int tries = 0; session_id.empty() && tries < 200; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    session_id = CreateSession();
  }
  const client::StepRequest after = Request();
  const absl::Status status = Step(after).get().first.status();
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace attnd::attnload

// The client library against a stand-in server: deadlines, retries, errors, restarts. No gRPC header here: the
// library's own must do.
#include "client/cpp/client.h"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/unit/client/fake_server.h"

namespace attnd::client {
namespace {

using ::attnd::FakeServer;

const std::vector<float> kZero = {0.0f};

class ClientTest : public ::testing::Test {
 protected:
  Client Connect(ClientOptions options = {}) {
    options.target = server_.target();
    options.retry.initial_backoff = absl::Milliseconds(10);
    absl::StatusOr<Client> client = Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *client;
  }
  void FailWith(absl::StatusCode code, const std::string& reason = "DRAINING") {
    server_.faults().error = {code, reason, "as told", {}};
  }
  // One token whose K is 0: the output is the mean of the V so far.
  static absl::StatusOr<StepResult> Append(const Session& session, float value, const StepOptions& options = {}) {
    return session.Step(0, kZero, kZero, std::vector<float>{value}, options);
  }
  static float Mean(const absl::StatusOr<StepResult>& result) {
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? result->out.As<float>()[0] : NAN;
  }

  FakeServer server_;
};

TEST_F(ClientTest, StepsAppendAndAttend) {
  Client client = Connect();
  absl::StatusOr<Session> session = client.CreateSession({});
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_FLOAT_EQ(Mean(Append(*session, 2)), 2);
  EXPECT_FLOAT_EQ(Mean(Append(*session, 8)), 5);
  std::vector<float> out(1);
  ASSERT_TRUE(session->Step(0, kZero, kZero, std::vector<float>{11}, std::span<float>(out)).ok());
  EXPECT_FLOAT_EQ(out[0], 7);
  EXPECT_EQ(session->Get()->layer_lengths, std::vector<int64_t>{3});
  EXPECT_TRUE(*session->Close());
  EXPECT_FALSE(*session->Close());
}

TEST_F(ClientTest, AppendOnlyAnswersNothing) {
  Client client = Connect();
  absl::StatusOr<Session> session = client.CreateSession({});
  ASSERT_TRUE(session->Step(0, {}, kZero, std::vector<float>{4}, std::span<float>()).ok());
  EXPECT_EQ(session->Get()->layer_lengths[0], 1);
  EXPECT_FLOAT_EQ(Mean(Append(*session, 8)), 6);
}

TEST_F(ClientTest, SizesThatDisagreeAreRefusedHereWithBothNumbers) {
  Client client = Connect();
  absl::StatusOr<Session> session = client.CreateSession({.num_q_heads = 2, .num_kv_heads = 1, .head_dim = 3});
  ASSERT_TRUE(session.ok());
  const int calls = server_.calls();
  std::vector<float> out(6), short_out(5);
  const std::vector<float> q(6), k(3), v(6);
  const absl::Status tokens = session->Step(0, q, k, v, std::span<float>(out));
  EXPECT_EQ(tokens.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(tokens.message(), "k has 1 tokens and v has 2");
  EXPECT_EQ(GetErrorDetails(tokens).reason, "BAD_SHAPE");
  EXPECT_EQ(session->Step(0, q, k, k, std::span<float>(short_out)).message(),
            "out has 5 elements and the answer has 6");
  EXPECT_EQ(server_.calls(), calls);
}

TEST_F(ClientTest, SafeCallsAreRetriedOnUnavailableAndOnlyThen) {
  Client client = Connect();
  FailWith(absl::StatusCode::kUnavailable);
  server_.faults().fail_calls = 3;
  EXPECT_TRUE(client.GetServerInfo().ok());
  EXPECT_EQ(server_.calls(), 4);
  FailWith(absl::StatusCode::kResourceExhausted);
  server_.faults().fail_calls = 1;
  EXPECT_TRUE(absl::IsResourceExhausted(client.GetServerInfo().status()));
  EXPECT_EQ(server_.calls(), 5);
}

TEST_F(ClientTest, RetriesAreBounded) {
  Client client = Connect({.retry = {.max_attempts = 3}});
  FailWith(absl::StatusCode::kUnavailable);
  server_.faults().fail_calls = 100;
  const absl::Status status = client.GetServerInfo().status();
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_EQ(GetErrorDetails(status).reason, "DRAINING");
  EXPECT_EQ(GetErrorDetails(status).metadata.at("fake"), "yes");
  EXPECT_EQ(server_.calls(), 3);
}

TEST_F(ClientTest, CreatingASessionIsNeverRetried) {
  Client client = Connect();
  FailWith(absl::StatusCode::kUnavailable);
  server_.faults().fail_calls = 1;
  EXPECT_TRUE(absl::IsUnavailable(client.CreateSession({}).status()));
  EXPECT_EQ(server_.calls(), 1);
}

TEST_F(ClientTest, ForkAndReorderAreNeverRetried) {
  Client client = Connect();
  absl::StatusOr<Session> a = client.CreateSession({});
  ASSERT_TRUE(Append(*a, 2).ok());
  absl::StatusOr<Session> b = a->Fork();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_FLOAT_EQ(Mean(Append(*b, 4)), 3);
  EXPECT_EQ(client.ReorderSessions({a->id(), b->id()}, {1, 0}).value(), (std::vector<int64_t>{2, 1}));
  EXPECT_FLOAT_EQ(Mean(Append(*b, 6)), 4);
  const int calls = server_.calls();
  FailWith(absl::StatusCode::kUnavailable);
  server_.faults().fail_calls = 2;
  EXPECT_TRUE(absl::IsUnavailable(client.ForkSession(a->id()).status()));
  EXPECT_TRUE(absl::IsUnavailable(client.ReorderSessions({a->id(), b->id()}, {1, 0}).status()));
  EXPECT_EQ(server_.calls(), calls + 2);
}

// The server did the work and its answer was lost (S09): without a position a retry would append twice.
TEST_F(ClientTest, AStepIsRetriedOnlyWhereItsPositionIsStated) {
  Client client = Connect();
  absl::StatusOr<Session> session = client.CreateSession({});
  for (float v : {1.0f, 2.0f, 3.0f}) ASSERT_TRUE(Append(*session, v).ok());
  FailWith(absl::StatusCode::kUnavailable);
  server_.faults().lose_answers = 1;
  EXPECT_FLOAT_EQ(Mean(Append(*session, 10, {.start_position = 3})), 4);
  EXPECT_EQ(session->Get()->layer_lengths[0], 4);
  EXPECT_EQ(server_.step_calls(), 5);
  server_.faults().lose_answers = 1;
  EXPECT_TRUE(absl::IsUnavailable(Append(*session, 10).status()));
  EXPECT_EQ(server_.step_calls(), 6);
}

// P02: a context used for a second attempt aborts the process.
TEST_F(ClientTest, AServerThatIsDownAndThenUpIsReached) {
  Client client = Connect({.retry = {.max_attempts = 100, .max_backoff = absl::Milliseconds(100)}});
  ASSERT_TRUE(client.GetServerInfo().ok());
  server_.Stop();
  std::thread later([this] {
    absl::SleepFor(absl::Milliseconds(500));
    server_.Restart();
  });
  const absl::StatusOr<ServerInfo> info = client.GetServerInfo();
  later.join();
  EXPECT_TRUE(info.ok()) << info.status();
}

// P07: after a restart the channel reconnects, and the session is said to be lost, not silently new.
TEST_F(ClientTest, ARestartedServersSessionsAreLost) {
  Client client = Connect({.retry = {.max_attempts = 100, .max_backoff = absl::Milliseconds(100)}});
  absl::StatusOr<Session> session = client.CreateSession({});
  ASSERT_TRUE(Append(*session, 1).ok());
  server_.Restart();
  const absl::Status status = Append(*session, 2, {.start_position = 1}).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_TRUE(IsSessionLost(status));
  EXPECT_TRUE(absl::StrContains(status.message(), "session lost, replay needed")) << status;
  EXPECT_EQ(GetErrorDetails(status).reason, "NEVER_EXISTED");
}

TEST_F(ClientTest, EveryCallHasADeadline) {
  Client client = Connect({.default_timeout = absl::Milliseconds(100)});
  absl::StatusOr<Session> session = client.CreateSession({});
  server_.faults().delay_ms = 400;
  EXPECT_TRUE(absl::IsDeadlineExceeded(Append(*session, 1).status()));
  StepOptions patient;
  patient.call.timeout = absl::Seconds(20);
  EXPECT_TRUE(Append(*session, 2, patient).ok());
}

TEST_F(ClientTest, AStopCancelsTheCall) {
  Client client = Connect();
  absl::StatusOr<Session> session = client.CreateSession({});
  server_.faults().delay_ms = 3000;
  std::stop_source source;
  std::thread later([&source] {
    absl::SleepFor(absl::Milliseconds(50));
    source.request_stop();
  });
  StepOptions options;
  options.call.stop = source.get_token();
  EXPECT_TRUE(absl::IsCancelled(Append(*session, 1, options).status()));
  later.join();
}

TEST_F(ClientTest, TheBearerTokenIsSent) {
  server_.faults().token = "secret";
  EXPECT_TRUE(Connect({.bearer_token = "secret"}).GetServerInfo().ok());
  EXPECT_TRUE(absl::IsUnauthenticated(Connect({.bearer_token = "wrong"}).GetServerInfo().status()));
  EXPECT_TRUE(absl::IsUnauthenticated(Connect().GetServerInfo().status()));
}

TEST_F(ClientTest, TokensAndCertificatesInTheClearAreRefused) {
  EXPECT_FALSE(Client::Connect({.target = "example.com:1", .bearer_token = "secret"}).ok());
  EXPECT_FALSE(Client::Connect({.tls = {.root_certificates = "PEM"}}).ok());
  EXPECT_FALSE(Client::Connect({.default_timeout = absl::ZeroDuration()}).ok());
}

// G01: gRPC's own limit of 4 MiB must not be felt in either direction, and ours is named.
TEST_F(ClientTest, MessagesUpToTheLimitPassAndLargerOnesAreNotSent) {
  Client client = Connect();
  const int heads = 8, dim = 128;
  absl::StatusOr<Session> session =
      client.CreateSession({.num_q_heads = heads, .num_kv_heads = heads, .head_dim = dim});
  for (int tokens : {341, 342}) {
    const std::vector<float> rows(tokens * heads * dim);
    EXPECT_TRUE(session->Step(0, rows, rows, rows).ok()) << tokens;
  }
  const int calls = server_.calls();
  const std::vector<float> rows(6000 * heads * dim);  // 3 x 23.4 MiB
  const absl::Status status = session->Step(0, rows, rows, rows).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_EQ(GetErrorDetails(status).reason, "MESSAGE_TOO_LARGE");
  EXPECT_TRUE(absl::StrContains(status.message(), "67108864")) << status;
  EXPECT_EQ(server_.calls(), calls);
}

// ---- without waiting

TEST_F(ClientTest, AsynchronousCallsAnswerOnceAndAreNotRetried) {
  Client client = Connect();
  absl::Notification created;
  absl::StatusOr<Session> session = absl::UnknownError("");
  client.CreateSessionAsync({}, {}, [&](absl::StatusOr<Session> answer) {
    session = std::move(answer);
    created.Notify();
  });
  created.WaitForNotification();
  ASSERT_TRUE(session.ok()) << session.status();
  const auto step = [&](const CallOptions& call) {
    absl::Notification answered;
    absl::StatusOr<StepResult> result = absl::UnknownError("");
    client.StepAsync(*session->MakeStep(0, kZero, kZero, std::vector<float>{4}), call,
                     [&](absl::StatusOr<StepResult> answer) {
                       result = std::move(answer);
                       answered.Notify();
                     });
    answered.WaitForNotification();
    return result;
  };
  EXPECT_FLOAT_EQ(Mean(step({})), 4);
  FailWith(absl::StatusCode::kUnavailable);
  server_.faults().fail_calls = 1;
  const int calls = server_.calls();
  const absl::Status failed = step({}).status();
  EXPECT_TRUE(absl::IsUnavailable(failed));
  EXPECT_EQ(GetErrorDetails(failed).reason, "DRAINING");
  EXPECT_EQ(server_.calls(), calls + 1);
  server_.faults().delay_ms = 300;
  EXPECT_TRUE(absl::IsDeadlineExceeded(step({.timeout = absl::Milliseconds(50), .stop = {}}).status()));
  std::stop_source stop;
  stop.request_stop();
  EXPECT_TRUE(absl::IsCancelled(step({.timeout = {}, .stop = stop.get_token()}).status()));
  server_.faults().delay_ms = 0;
  absl::Notification closed;
  client.CloseSessionAsync(session->id(), {}, [&](absl::StatusOr<bool> was_open) {
    EXPECT_TRUE(was_open.ok() && *was_open);
    closed.Notify();
  });
  closed.WaitForNotification();
}

}  // namespace
}  // namespace attnd::client

// Forks and reorders through the service, by its RPCs and by the C++ client.
#include <gmock/gmock.h>

#include <future>

#include "client/cpp/client.h"
#include "tests/service/harness.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;
using ::testing::ElementsAre;

class ForkTest : public ServiceTest {
 protected:
  grpc::Status Fork(const std::string& id, std::optional<int64_t> length, v1::Session* child) {
    grpc::ClientContext context;
    v1::ForkSessionRequest request;
    request.set_session_id(id);
    if (length) request.set_length(*length);
    return stub_->ForkSession(&context, request, child);
  }
  std::string ForkId(const std::string& id, std::optional<int64_t> length = {}) {
    v1::Session child;
    const grpc::Status status = Fork(id, length, &child);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return child.session_id();
  }
  void ExpectForkError(const std::string& id, std::optional<int64_t> length, StatusCode code,
                       const std::string& reason) {
    v1::Session child;
    const grpc::Status status = Fork(id, length, &child);
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_EQ(ReasonOf(status), reason);
  }

  grpc::Status Reorder(const std::vector<std::string>& ids, const std::vector<int>& sources,
                       v1::ReorderSessionsResponse* response) {
    grpc::ClientContext context;
    v1::ReorderSessionsRequest request;
    request.mutable_session_ids()->Assign(ids.begin(), ids.end());
    request.mutable_sources()->Assign(sources.begin(), sources.end());
    return stub_->ReorderSessions(&context, request, response);
  }
  void ExpectReorderError(const std::vector<std::string>& ids, const std::vector<int>& sources, StatusCode code,
                          const std::string& reason) {
    v1::ReorderSessionsResponse response;
    const grpc::Status status = Reorder(ids, sources, &response);
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_EQ(ReasonOf(status), reason);
  }

  Client Connect() {
    absl::StatusOr<Client> client = Client::Connect({.target = server_->address()});
    EXPECT_TRUE(client.ok()) << client.status();
    return *client;
  }
};

TEST_F(ForkTest, S14_ChildAndParentGoTheirOwnWays) {
  StartServer();
  const std::string parent = Create();
  Mean(parent, {1, 2, 3});
  v1::Session child;
  ASSERT_TRUE(Fork(parent, {}, &child).ok());
  EXPECT_NE(child.session_id(), parent);
  EXPECT_EQ(child.length(), 3);
  EXPECT_THAT(child.layer_lengths(), ElementsAre(3));
  EXPECT_EQ(Mean(child.session_id(), {9}), Floats({3.75}));
  EXPECT_EQ(Mean(parent, {6}), Floats({3}));
  EXPECT_TRUE(Close(parent).ok());
  EXPECT_EQ(Mean(child.session_id(), {9}), Floats({4.8f}));
  EXPECT_EQ(Mean(ForkId(child.session_id(), 1), {3}), Floats({2})) << "of a fork, at one token";
  EXPECT_EQ(Metric("attnd_sessions_created_total{origin=\"fork\"}"), 2);
  EXPECT_EQ(Metric("attnd_sessions_created_total{origin=\"create\"}"), 1);
  EXPECT_EQ(Handled("ForkSession", "OK"), 2);
}

TEST_F(ForkTest, M03_SharedBlocksCountOnce) {
  StartServer();
  const std::string parent = Create();
  Mean(parent, Floats(256, 1));
  const double alone = Metric("attnd_kv_cache_used_bytes");
  EXPECT_EQ(Metric("attnd_kv_cache_shared_bytes"), 0);
  const std::string child = ForkId(parent);
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), alone);
  EXPECT_EQ(Metric("attnd_kv_cache_shared_bytes"), alone);  // 256 tokens
  EXPECT_EQ(Metric("attnd_kv_cache_tokens"), 512);
  EXPECT_TRUE(Close(parent).ok());
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), alone);
  EXPECT_EQ(Metric("attnd_kv_cache_shared_bytes"), 0);
  EXPECT_TRUE(Close(child).ok());
  for (const char* gauge : {"used_bytes", "shared_bytes", "reserved_bytes", "tokens"}) {
    EXPECT_EQ(Metric(std::string("attnd_kv_cache_") + gauge), 0) << gauge;
  }
}

TEST_F(ForkTest, ForksThatCannotBe) {
  Options options = DefaultOptions();
  options.max_sessions = 2;
  StartServer(options);
  const std::string parent = Create();
  Mean(parent, {1, 2, 3});
  ExpectForkError(parent, 4, StatusCode::INVALID_ARGUMENT, "BAD_POSITION");
  ExpectForkError(parent, -1, StatusCode::INVALID_ARGUMENT, "BAD_POSITION");
  ExpectForkError("", {}, StatusCode::INVALID_ARGUMENT, "BAD_SESSION_ID");
  ExpectForkError(std::string(1000, 'a'), {}, StatusCode::INVALID_ARGUMENT, "BAD_SESSION_ID");
  ExpectForkError(std::string(32, 'a'), {}, StatusCode::NOT_FOUND, "NEVER_EXISTED");
  const std::string child = ForkId(parent, 0);
  EXPECT_EQ(Get(child).length(), 0);
  v1::Session another;
  const grpc::Status full = Fork(parent, {}, &another);
  EXPECT_EQ(ReasonOf(full), "SESSION_LIMIT");
  EXPECT_TRUE(HasRetryInfo(full));
  EXPECT_EQ(Metric("attnd_rejected_total{reason=\"SESSION_LIMIT\"}"), 1);
  EXPECT_TRUE(Close(parent).ok());
  ExpectForkError(parent, {}, StatusCode::NOT_FOUND, "CLOSED");
  EXPECT_EQ(Info().sessions_active(), 1);
}

TEST_F(ForkTest, WindowsFreeAndRefuseToGoBack) {
  StartServer();
  v1::SessionConfig config = MeanConfig(2);
  config.add_layer_windows(0);
  config.add_layer_windows(10);
  const std::string id = Create(config);
  for (int layer = 0; layer < 2; layer++) {
    for (int part = 0; part < 3; part++) {
      v1::StepRequest step = MeanStep(id, Floats(100, 1));
      step.set_layer(layer);
      v1::StepResponse response;
      ASSERT_TRUE(Step(step, &response).ok());
    }
  }
  const v1::Session session = Get(id);
  EXPECT_THAT(session.layer_first_tokens(), ElementsAre(0, 128));
  EXPECT_EQ(session.used_bytes(), (5 + 3) * 512);
  v1::Session child;
  const grpc::Status freed = Fork(id, 136, &child);
  EXPECT_EQ(freed.error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(ReasonOf(freed), "TOKENS_FREED");
  EXPECT_EQ(ErrorInfoOf(freed).metadata().at("first_token"), "128");
  ASSERT_TRUE(Fork(id, 137, &child).ok());
  EXPECT_THAT(child.layer_first_tokens(), ElementsAre(0, 128));
  v1::StepRequest step = MeanStep(id, {1});
  step.set_layer(1);
  step.mutable_segments(0)->set_start_position(136);
  step.mutable_segments(0)->set_rewind(true);
  v1::StepResponse response;
  EXPECT_EQ(ReasonOf(Step(step, &response)), "TOKENS_FREED");
  grpc::ClientContext context;
  v1::RewindSessionRequest rewind;
  rewind.set_session_id(id);
  rewind.set_length(136);
  EXPECT_EQ(ReasonOf(stub_->RewindSession(&context, rewind, &child)), "TOKENS_FREED");
  EXPECT_EQ(Get(id).length(), 300);
}

TEST_F(ForkTest, ReorderTakesHistories) {
  StartServer();
  std::vector<std::string> rows;
  for (int i = 0; i < 4; i++) {
    rows.push_back(Create());
    Mean(rows[i], Floats(10 * (i + 1), static_cast<float>(i)));
  }
  v1::ReorderSessionsResponse response;
  ASSERT_TRUE(Reorder(rows, {3, 0, 0, 2}, &response).ok());
  EXPECT_THAT(response.lengths(), ElementsAre(40, 10, 10, 30));
  EXPECT_EQ(Mean(rows[0], {3}), Floats({3}));
  EXPECT_EQ(Mean(rows[1], {0}), Floats({0}));
  EXPECT_EQ(Mean(rows[2], {11}), Floats({1}));
  EXPECT_EQ(Mean(rows[3], {2}), Floats({2}));
  EXPECT_EQ(Handled("ReorderSessions", "OK"), 1);
  for (const std::string& row : rows) EXPECT_TRUE(Close(row).ok());
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), 0);
}

TEST_F(ForkTest, ReordersThatCannotBe) {
  StartServer();
  const std::string a = Create(), b = Create(), two_layers = Create(2);
  v1::SessionConfig short_config = MeanConfig();
  short_config.set_max_tokens(2);
  const std::string short_one = Create(short_config);
  Mean(a, {1, 1, 1});
  Mean(b, {2, 2});
  ExpectReorderError({}, {}, StatusCode::INVALID_ARGUMENT, "BAD_SHAPE");
  ExpectReorderError({a, b}, {1}, StatusCode::INVALID_ARGUMENT, "BAD_SHAPE");
  ExpectReorderError({a, b}, {1, 2}, StatusCode::INVALID_ARGUMENT, "BAD_SHAPE");
  ExpectReorderError({a, b}, {-1, 0}, StatusCode::INVALID_ARGUMENT, "BAD_SHAPE");
  ExpectReorderError({a, a}, {1, 0}, StatusCode::INVALID_ARGUMENT, "DUPLICATE_SESSION");
  ExpectReorderError({b, ""}, {1, 0}, StatusCode::INVALID_ARGUMENT, "BAD_SESSION_ID");
  ExpectReorderError({b, std::string(32, 'a')}, {1, 0}, StatusCode::NOT_FOUND, "NEVER_EXISTED");
  ExpectReorderError({a, b, two_layers}, {1, 0, 0}, StatusCode::INVALID_ARGUMENT, "BAD_CONFIG");
  ExpectReorderError({a, b, short_one}, {1, 0, 0}, StatusCode::FAILED_PRECONDITION, "TOO_LONG");
  ExpectReorderError(std::vector<std::string>(4097, a), std::vector<int>(4097), StatusCode::INVALID_ARGUMENT,
                     "BAD_SHAPE");
  EXPECT_EQ(Mean(a, {1}), Floats({1}));
  EXPECT_EQ(Mean(b, {2}), Floats({2}));
}

// A fork and a reorder that wait for a step hold up neither the service nor other sessions.
TEST_F(ForkTest, TheyComeBehindQueuedSteps) {
  StartServer();
  const std::string a = Create(), b = Create(), other = Create();
  gate_.Close();
  auto step = std::async(std::launch::async, [&] { return Mean(a, {1, 2, 3}); });
  gate_.AwaitBatch();
  auto fork = std::async(std::launch::async, [&] { return ForkId(a); });
  v1::ReorderSessionsResponse response;
  auto reorder = std::async(std::launch::async, [&] { return Reorder({a, b}, {0, 0}, &response); });
  EXPECT_EQ(Get(ForkId(other)).length(), 0);
  EXPECT_TRUE(Eventually([&] { return Metric("attnd_queue_depth") == 2; }));
  gate_.Open();
  EXPECT_EQ(step.get(), Floats({1, 1.5, 2}));
  EXPECT_EQ(Get(fork.get()).length(), 3);
  ASSERT_TRUE(reorder.get().ok());
  EXPECT_THAT(response.lengths(), ElementsAre(3, 3));
}

TEST_F(ForkTest, ByTheCppClient) {
  StartServer();
  const Client client = Connect();
  absl::StatusOr<ClientSession> parent = client.CreateSession({});
  ASSERT_TRUE(parent.ok()) << parent.status();
  const std::vector<float> zeros(3), values = {1, 2, 3};
  ASSERT_TRUE(parent->Step(0, zeros, zeros, values).ok());
  absl::StatusOr<ClientSession> child = parent->Fork();
  ASSERT_TRUE(child.ok()) << child.status();
  const auto next = [](const ClientSession& session, float value) {
    std::vector<float> zero = {0}, out(1);
    EXPECT_TRUE(session.Step(0, zero, zero, std::vector<float>{value}, std::span<float>(out)).ok());
    return out[0];
  };
  EXPECT_EQ(next(*child, 9), 3.75f);
  EXPECT_EQ(next(*parent, 6), 3);
  EXPECT_EQ(client.ForkSession(parent->id(), 2)->Get()->layer_lengths, std::vector<int64_t>{2});
  EXPECT_EQ(client.ReorderSessions({parent->id(), child->id()}, {1, 1}).value(), (std::vector<int64_t>{4, 4}));
  EXPECT_EQ(next(*parent, 9), 4.8f);
  EXPECT_EQ(client::GetErrorDetails(parent->Fork(99).status()).reason, "BAD_POSITION");
  EXPECT_EQ(client::GetErrorDetails(client.ReorderSessions({parent->id()}, {1}).status()).reason, "BAD_SHAPE");
  EXPECT_TRUE(*parent->Close());
  EXPECT_TRUE(client::IsSessionLost(parent->Fork().status()));
  EXPECT_TRUE(client::IsSessionLost(client.ReorderSessions({child->id(), parent->id()}, {0, 0}).status()));
}

}  // namespace
}  // namespace attnd::testing

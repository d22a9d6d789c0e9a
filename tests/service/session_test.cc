// Sessions as clients see them. Scenario names (S01, ...) are those of the project's list of failures that people have
// reported of systems like this one.
#include <cmath>
#include <limits>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/service/harness.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;

class SessionTest : public ServiceTest {
 protected:
  grpc::Status Rewind(const std::string& id, int64_t length) {
    grpc::ClientContext context;
    v1::RewindSessionRequest request;
    request.set_session_id(id);
    request.set_length(length);
    v1::Session session;
    grpc::Status status = stub_->RewindSession(&context, request, &session);
    if (status.ok()) {
      EXPECT_EQ(session.length(), length);
    }
    return status;
  }

  v1::ListSessionsResponse List(int page_size, const std::string& token) {
    grpc::ClientContext context;
    v1::ListSessionsRequest request;
    request.set_page_size(page_size);
    request.set_page_token(token);
    v1::ListSessionsResponse response;
    EXPECT_TRUE(stub_->ListSessions(&context, request, &response).ok());
    return response;
  }
};

TEST_F(SessionTest, StepAppendsAndAttends) {
  StartServer();
  const std::string id = Create();
  EXPECT_EQ(Mean(id, {1}), Floats({1}));
  EXPECT_EQ(Mean(id, {2, 3}), Floats({1.5, 2}));
  EXPECT_EQ(Mean(id, {6}), Floats({3}));
  const v1::Session session = Get(id);
  EXPECT_EQ(session.length(), 4);
  EXPECT_GT(session.used_bytes(), 0);
  EXPECT_GE(session.reserved_bytes(), session.used_bytes());
  EXPECT_EQ(session.config().value_dim(), 1);
  EXPECT_EQ(session.config().kv_dtype(), v1::KV_DTYPE_F32);
  EXPECT_TRUE(session.config().softmax().causal());
  EXPECT_GT(session.time_to_live().seconds(), 0);
}

// What a session of each KV dtype holds, and what it cannot hold.
TEST_F(SessionTest, EveryKvDType) {
  StartServer();
  for (const auto dtype : {v1::KV_DTYPE_F32, v1::KV_DTYPE_BF16, v1::KV_DTYPE_F16, v1::KV_DTYPE_INT8}) {
    v1::SessionConfig config = MeanConfig();
    config.set_kv_dtype(dtype);
    const std::string id = Create(config);
    EXPECT_EQ(Mean(id, {1}), Floats({1}));
    EXPECT_EQ(Mean(id, {2, 3}), Floats({1.5, 2}));
    EXPECT_EQ(Get(id).config().kv_dtype(), dtype);
    // head_dim and value_dim are 1: K in pairs or quads, and INT8's scales.
    const int64_t token_bytes = dtype == v1::KV_DTYPE_F32 ? 8 : dtype == v1::KV_DTYPE_BF16 ? 6 : 4;
    EXPECT_EQ(Get(id).used_bytes(), 64 * (dtype == v1::KV_DTYPE_INT8 ? 4 + 1 + 8 : token_bytes));
    if (dtype == v1::KV_DTYPE_F16) {
      const grpc::Status status = MeanError(id, {1, 65520});
      EXPECT_EQ(ReasonOf(status), "NOT_FINITE");
      EXPECT_NE(status.error_message().find("v row 1, head 0, element 0 is beyond the range"), std::string::npos);
    }
    EXPECT_EQ(Get(id).length(), 3);
  }
}

TEST_F(SessionTest, S01_LifecycleErrorsSayWhichOneItIs) {
  StartServer();
  EXPECT_EQ(MeanError("00000000000000000000000000000000", {1}).error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(ReasonOf(MeanError("00000000000000000000000000000000", {1})), "NEVER_EXISTED");
  EXPECT_EQ(MeanError("", {1}).error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(MeanError(std::string(10'000, 'x'), {1}).error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(ReasonOf(MeanError("with \"quotes\"\nand a line", {1})), "");

  const std::string id = Create();
  EXPECT_EQ(Mean(id, {1}), Floats({1}));
  EXPECT_TRUE(Close(id).ok());
  EXPECT_EQ(ReasonOf(MeanError(id, {1})), "CLOSED");
  EXPECT_TRUE(Close(id).ok()) << "closing twice is fine";
  EXPECT_EQ(ReasonOf(Close("00000000000000000000000000000000")), "NEVER_EXISTED");
  EXPECT_EQ(Metric("attnd_sessions_active"), 0);
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), 0);
}

TEST_F(SessionTest, S02_IdsAreUnguessableAndNeverGivenTwice) {
  StartServer();
  const std::string first = Create(), second = Create();
  EXPECT_NE(first, second);
  EXPECT_EQ(first.size(), 32u);
  EXPECT_EQ(Mean(first, {1, 2, 3}), Floats({1, 1.5, 2}));
  EXPECT_EQ(Mean(second, {100}), Floats({100}));
  EXPECT_EQ(Mean(first, {6}), Floats({3}));
}

TEST_F(SessionTest, S08_AStepThatFailsLeavesTheSessionAsItWas) {
  StartServer();
  const std::string id = Create();
  Mean(id, {1, 2, 3});
  const int64_t used = Get(id).used_bytes();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const grpc::Status not_finite = MeanError(id, {50, 50, nan, 50});
  EXPECT_EQ(not_finite.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(ReasonOf(not_finite), "NOT_FINITE");

  v1::StepRequest wrong_bytes = MeanStep(id, {50, 50});
  wrong_bytes.mutable_v()->mutable_data()->append(8, '\0');
  v1::StepResponse response;
  EXPECT_EQ(ReasonOf(Step(wrong_bytes, &response)), "BAD_SHAPE");

  EXPECT_EQ(Get(id).length(), 3);
  EXPECT_EQ(Get(id).used_bytes(), used);
  EXPECT_EQ(Mean(id, {6}), Floats({3}));
}

TEST_F(SessionTest, S08_CancelledAndExpiredStepsAppendNothing) {
  StartServer();
  const std::string id = Create();
  Mean(id, {1, 2, 3});
  gate_.Close();
  // One step holds the compute thread in the gate, the other waits in the queue behind it.
  const std::string other = Create();
  std::thread holder([&] { Mean(other, {1}); });
  gate_.AwaitBatch();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  v1::StepResponse response;
  EXPECT_EQ(stub_->Step(&context, MeanStep(id, {50}), &response).error_code(), StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(WaitForMetric("attnd_requests_in_flight", 1)) << "the server knows too";
  gate_.Open();
  holder.join();
  EXPECT_EQ(Mean(id, {6}), Floats({3}));
  EXPECT_EQ(Get(id).length(), 4);
}

TEST_F(SessionTest, S09_AReplayRewritesTheSamePlaceAndAnswersTheSame) {
  StartServer();
  const std::string id = Create();
  Mean(id, {1, 2, 3});
  v1::StepRequest request = MeanStep(id, {10});
  request.mutable_segments(0)->set_start_position(3);
  for (int attempt = 0; attempt < 3; ++attempt) {
    v1::StepResponse response;
    ASSERT_TRUE(Step(request, &response).ok());
    EXPECT_EQ(ToFloats(response.out()), Floats({4}));
    EXPECT_EQ(response.segments(0).length(), 4);
    EXPECT_EQ(response.segments(0).start_position(), 3);
  }
  EXPECT_EQ(Get(id).length(), 4);

  request.mutable_segments(0)->set_start_position(7);
  v1::StepResponse response;
  const grpc::Status beyond = Step(request, &response);
  EXPECT_EQ(beyond.error_code(), StatusCode::FAILED_PRECONDITION);
  const v1::ErrorInfo info = ErrorInfoOf(beyond);
  EXPECT_EQ(info.reason(), "BAD_POSITION");
  EXPECT_EQ(info.domain(), "attnd");
  EXPECT_EQ(info.metadata().at("length"), "4");
  request.mutable_segments(0)->set_start_position(1);
  EXPECT_EQ(ReasonOf(Step(request, &response)), "BAD_POSITION") << "no silent rewind";
  request.mutable_segments(0)->set_rewind(true);
  ASSERT_TRUE(Step(request, &response).ok());
  EXPECT_EQ(ToFloats(response.out()), Floats({5.5}));
  EXPECT_EQ(Get(id).length(), 2);
}

TEST_F(SessionTest, S10_StepsOfManyClientsOnOneSessionAllCount) {
  StartServer();
  const std::string id = Create();
  std::vector<std::thread> clients;
  for (int client = 0; client < 2; ++client) {
    clients.emplace_back([&, client] {
      for (int i = 1; i <= 100; ++i) Mean(id, {static_cast<float>(client * 100 + i)});
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(Get(id).length(), 200);
  const Floats probe = Mean(id, {100.5});
  ASSERT_EQ(probe.size(), 1u);
  EXPECT_NEAR(probe[0], 100.5, 1e-3);
}

TEST_F(SessionTest, S12_RewoundTokensAreGone) {
  StartServer();
  for (int cut = 0; cut <= 6; ++cut) {
    const std::string id = Create();
    Mean(id, {1, 2, 3, 4, 5, 6});
    ASSERT_TRUE(Rewind(id, cut).ok());
    const float sum = static_cast<float>(cut * (cut + 1)) / 2 + 9;
    const Floats out = Mean(id, {9});
    EXPECT_NEAR(out[0], sum / static_cast<float>(cut + 1), 1e-5) << cut;
    const grpc::Status beyond = Rewind(id, cut + 2);
    EXPECT_EQ(beyond.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(ReasonOf(beyond), "BAD_POSITION");
    EXPECT_EQ(Rewind(id, -1).error_code(), StatusCode::INVALID_ARGUMENT);
  }
}

// A cache of about a thousand tokens: 512 values and keys of 4 bytes each.
Options ThousandTokens(Options options) {
  options.kv_cache_bytes = int64_t{2} << 20;
  return options;
}

v1::SessionConfig WideConfig() {
  v1::SessionConfig config = ServiceTest::MeanConfig();
  config.set_head_dim(256);
  return config;
}

v1::StepRequest WideStep(const std::string& id, int tokens, float value) {
  v1::StepRequest request = MeanStep(id, Floats(tokens, 0));
  *request.mutable_q() = F32(Floats(tokens * 256, 0));
  *request.mutable_k() = *request.mutable_q();
  *request.mutable_v() = F32(Floats(tokens * 256, value));
  return request;
}

TEST_F(SessionTest, S21_OnlyTheSessionThatAsksTooMuchIsRefused) {
  StartServer(ThousandTokens(DefaultOptions()));
  const int64_t capacity = [&] {
    grpc::ClientContext context;
    v1::GetServerInfoRequest request;
    *request.mutable_config() = WideConfig();
    v1::ServerInfo info;
    EXPECT_TRUE(stub_->GetServerInfo(&context, request, &info).ok());
    EXPECT_EQ(info.tokens_available(), info.tokens_capacity());
    EXPECT_GT(info.bytes_per_token(), 0);
    return info.tokens_capacity();
  }();
  ASSERT_GT(capacity, 500);
  const std::string big = Create(WideConfig()), small = Create(WideConfig());
  v1::StepResponse response;
  ASSERT_TRUE(Step(WideStep(small, 10, 7), &response).ok());
  ASSERT_TRUE(Step(WideStep(big, static_cast<int>(capacity) - 192, 5), &response).ok());
  const int64_t length = Get(big).length();

  const grpc::Status full = Step(WideStep(big, 192, 5), &response);
  EXPECT_EQ(full.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(full), "CACHE_FULL") << full.error_message();
  EXPECT_TRUE(HasRetryInfo(full));
  EXPECT_EQ(Get(big).length(), length);
  ASSERT_TRUE(Step(WideStep(small, 1, 7), &response).ok());
  EXPECT_EQ(ToFloats(response.out()), Floats(256, 7.0f));
  ASSERT_TRUE(Step(WideStep(big, 1, 5), &response).ok());
  EXPECT_EQ(ToFloats(response.out()), Floats(256, 5.0f));
}

TEST_F(SessionTest, C01_WhatCanNeverFitIsRefusedAtOnceAndBlocksNobody) {
  StartServer(ThousandTokens(DefaultOptions()));
  const std::string big = Create(WideConfig()), small = Create(WideConfig());
  v1::StepResponse response;
  const absl::Time start = absl::Now();
  const grpc::Status never = Step(WideStep(big, 3000, 5), &response);
  EXPECT_EQ(never.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(never), "TOO_MANY_TOKENS") << never.error_message();
  EXPECT_FALSE(HasRetryInfo(never));
  EXPECT_NE(never.error_message().find("3000"), std::string::npos) << never.error_message();
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(Step(WideStep(small, 1, 7), &response).ok());
  EXPECT_LT(absl::Now() - start, absl::Seconds(2));
  EXPECT_EQ(Metric("attnd_queue_depth"), 0);
}

TEST_F(SessionTest, MaxTokensBoundsASession) {
  StartServer();
  v1::SessionConfig config = MeanConfig();
  config.set_max_tokens(3);
  const std::string id = Create(config);
  Mean(id, {1, 2, 3});
  const grpc::Status status = MeanError(id, {4});
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(status), "TOO_MANY_TOKENS");
}

TEST_F(SessionTest, TheSessionLimitIsAnErrorOfItsOwn) {
  Options options = DefaultOptions();
  options.max_sessions = 2;
  StartServer(options);
  const std::string first = Create();
  Create();
  grpc::ClientContext context;
  v1::CreateSessionRequest request;
  *request.mutable_config() = MeanConfig();
  v1::Session session;
  const grpc::Status status = stub_->CreateSession(&context, request, &session);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(status), "SESSION_LIMIT");
  EXPECT_TRUE(Close(first).ok());
  Create();
}

TEST_F(SessionTest, AnIdleSessionExpires) {
  StartServer();
  v1::SessionConfig config = MeanConfig();
  config.mutable_ttl()->set_nanos(50'000'000);
  const std::string id = Create(config);
  Mean(id, {1});
  EXPECT_TRUE(Eventually([&] { return Metric("attnd_sessions_active") == 0; }));
  const grpc::Status status = MeanError(id, {1});
  EXPECT_EQ(status.error_code(), StatusCode::NOT_FOUND);
  EXPECT_EQ(ReasonOf(status), "EXPIRED");
  EXPECT_EQ(Metric("attnd_sessions_closed_total{reason=\"expired\"}"), 1);
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), 0);
  EXPECT_TRUE(Close(id).ok());
}

TEST_F(SessionTest, ListsByPagesInTheOrderOfCreation) {
  StartServer();
  std::vector<std::string> created, listed;
  for (int i = 0; i < 7; ++i) created.push_back(Create());
  std::string token;
  int pages = 0;
  do {
    const v1::ListSessionsResponse page = List(3, token);
    for (const v1::Session& session : page.sessions()) listed.push_back(session.session_id());
    token = page.next_page_token();
    ++pages;
  } while (!token.empty());
  EXPECT_EQ(listed, created);
  EXPECT_EQ(pages, 3);
  EXPECT_EQ(List(0, "").sessions_size(), 7);

  grpc::ClientContext context;
  v1::ListSessionsRequest request;
  request.set_page_token("no such token");
  v1::ListSessionsResponse response;
  EXPECT_EQ(stub_->ListSessions(&context, request, &response).error_code(), StatusCode::INVALID_ARGUMENT);
}

TEST_F(SessionTest, ManySegmentsCarryTheirOwnStatuses) {
  StartServer();
  const std::string a = Create(), b = Create();
  Mean(a, {1, 2, 3});
  v1::StepRequest request;
  for (const std::string& id : {a, std::string("00000000000000000000000000000000"), b}) {
    v1::Segment* segment = request.add_segments();
    segment->set_session_id(id);
    segment->set_num_tokens(1);
  }
  *request.mutable_q() = F32({0, 0, 0});
  *request.mutable_k() = F32({0, 0, 0});
  *request.mutable_v() = F32({6, 7, 8});
  request.set_return_lse(true);
  v1::StepResponse response;
  ASSERT_TRUE(Step(request, &response).ok());
  ASSERT_EQ(response.segments_size(), 3);
  EXPECT_FALSE(response.segments(0).has_status());
  EXPECT_EQ(response.segments(0).length(), 4);
  EXPECT_EQ(response.segments(1).status().code(), static_cast<int>(StatusCode::NOT_FOUND));
  EXPECT_EQ(response.segments(1).status().reason(), "NEVER_EXISTED");
  EXPECT_FALSE(response.segments(2).has_status());
  EXPECT_EQ(ToFloats(response.out()), Floats({3, 0, 8}));
  const Floats lse = ToFloats(response.lse());
  EXPECT_NEAR(lse[0], std::log(4.0), 1e-5);
  EXPECT_NEAR(lse[2], 0, 1e-5);
}

TEST_F(SessionTest, AppendOnlyAndAttendOnly) {
  StartServer();
  const std::string id = Create();
  v1::StepRequest append = MeanStep(id, {1, 2, 3});
  append.clear_q();
  v1::StepResponse response;
  ASSERT_TRUE(Step(append, &response).ok());
  EXPECT_TRUE(response.out().data().empty());
  EXPECT_EQ(response.segments(0).length(), 3);
  v1::StepRequest attend = MeanStep(id, {0});
  attend.clear_k();
  attend.clear_v();
  ASSERT_TRUE(Step(attend, &response).ok());
  EXPECT_EQ(ToFloats(response.out()), Floats({2}));
  EXPECT_EQ(Get(id).length(), 3);
}

TEST_F(SessionTest, CreateNamesBothNumbersThatDisagree) {
  StartServer();
  struct Case {
    int q_heads, kv_heads;
    const char* named;
  };
  for (const Case& c : {Case{6, 4, "4"}, Case{2, 4, "4"}, Case{4, 0, "0"}, Case{-1, 1, "-1"}}) {
    grpc::ClientContext context;
    v1::CreateSessionRequest request;
    *request.mutable_config() = MeanConfig();
    request.mutable_config()->set_num_q_heads(c.q_heads);
    request.mutable_config()->set_num_kv_heads(c.kv_heads);
    v1::Session session;
    const grpc::Status status = stub_->CreateSession(&context, request, &session);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(ReasonOf(status), "BAD_CONFIG");
    EXPECT_NE(status.error_message().find(c.named), std::string::npos) << status.error_message();
  }
  EXPECT_EQ(Metric("attnd_sessions_active"), 0);
}

TEST_F(SessionTest, WindowOfZeroIsRefusedAndUnsetIsNone) {
  StartServer();
  v1::SessionConfig config = MeanConfig();
  config.mutable_softmax()->set_window(0);
  grpc::ClientContext context;
  v1::CreateSessionRequest request;
  *request.mutable_config() = config;
  v1::Session session;
  EXPECT_EQ(ReasonOf(stub_->CreateSession(&context, request, &session)), "BAD_CONFIG");
  config.mutable_softmax()->set_window(3);
  const std::string id = Create(config);
  EXPECT_EQ(Mean(id, {0, 1, 2, 3, 4, 5}), Floats({0, 0.5, 1, 2, 3, 4}));
}

}  // namespace
}  // namespace attnd::testing

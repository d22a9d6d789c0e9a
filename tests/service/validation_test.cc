// What is refused at the edge, before anything is allocated or computed.
#include <functional>
#include <limits>
#include <vector>

#include "absl/time/clock.h"
#include "tests/service/attend_fixture.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;

class ValidationTest : public AttendFixture {};

TEST_F(ValidationTest, OptionsOutOfRange) {
  StartServer();
  const float inf = std::numeric_limits<float>::infinity();
  v1::AttendRequest good = Row(0, {0, 0}, {1, 2});
  v1::AttendRequest bad = good;
  bad.mutable_softmax()->set_softcap(0);
  Refused(bad);
  bad = good;
  bad.mutable_softmax()->set_softmax_scale(inf);
  Refused(bad);
  bad = good;
  bad.mutable_softmax()->set_window(0);
  Refused(bad);
  bad = good;
  bad.mutable_softmax()->add_sinks(1);
  bad.mutable_softmax()->add_sinks(1);
  Refused(bad);
  bad = good;
  bad.mutable_q()->set_dtype(v1::DTYPE_UNSPECIFIED);
  Refused(bad);
  bad = good;
  bad.mutable_q()->set_dtype(static_cast<v1::DType>(17));
  Refused(bad);
  bad = good;
  bad.set_kv_dtype(static_cast<v1::KvDType>(17));
  Refused(bad);
  bad = good;
  bad.mutable_mask()->set_rows(1);
  bad.mutable_mask()->set_columns(2);
  Refused(bad);
}

// V01: products that wrap, bytes that do not fit, all refused quickly and without memory.
TEST_F(ValidationTest, V01_ShapesThatWrapOrDisagree) {
  StartServer();
  struct Shape {
    int64_t queries, keys;
    int q_heads, kv_heads, head_dim, value_dim;
    size_t q_bytes;
  };
  const int64_t wraps = 4611686018427387906;  // times 4 is 8 modulo 2^64
  const std::vector<Shape> shapes = {
      {65536, 65536, 1, 1, 1, 1, 0},  {wraps, wraps, 1, 1, 1, 1, 8},
      {wraps, 1, 1, 1, 1, 1, 8},      {-1, -1, 1, 1, 1, 1, 4},
      {-2, -3, 1, 1, 1, 1, 24},       {0, 1, 4, 1, 1, 1, 0},
      {1, 2, 3, 3, 1, 1, 23},         {1, 2, 3, 3, 1, 1, 25},
      {1, 2, 3, 3, 1, 1, 0},          {1, 1, 2147483647, 2147483647, 1, 1, 4},
      {1, 1, 2147483647, 1, 1, 1, 4}, {536870911, 1, 1, 1, 1, 1, 4},
      {1, 1, 1, 1, 0, 1, 4},          {1, 1, 1, 1, 257, 1, 4},
      {1, 1, 1, 1, 1, 257, 4},        {1, 1, 1, 1, 1, -1, 4},
      {1, 1, 6, 4, 1, 1, 24},         {1, 1, 2, 4, 1, 1, 8},
  };
  Value1(Row(0, {0}, {4}));
  const double resident = Metric("process_resident_memory_bytes");
  for (const Shape& s : shapes) {
    v1::AttendRequest request;
    request.set_num_queries(s.queries);
    request.set_num_keys(s.keys);
    request.set_num_q_heads(s.q_heads);
    request.set_num_kv_heads(s.kv_heads);
    request.set_head_dim(s.head_dim);
    request.set_value_dim(s.value_dim);
    *request.mutable_q() = F32({});
    *request.mutable_k() = F32({});
    *request.mutable_v() = F32({});
    request.mutable_q()->mutable_data()->resize(s.q_bytes);
    const absl::Time start = absl::Now();
    const grpc::Status status = Refused(request);
    EXPECT_LT(absl::Now() - start, absl::Milliseconds(500));
    EXPECT_EQ(ReasonOf(status), "BAD_SHAPE") << s.queries << " " << status.error_message();
  }
  EXPECT_LT(Metric("process_resident_memory_bytes") - resident, 8 << 20);
  EXPECT_FLOAT_EQ(Value1(Row(0, {0}, {4})), 4) << "still alive";
}

TEST_F(ValidationTest, V03_AnswersThatCannotBeSentAreRefusedBeforeTheyAreMade) {
  Options options = DefaultOptions();
  options.max_message_bytes = 1 << 20;
  StartServer(options);
  // 200 kB in, 51 MB out.
  v1::AttendRequest request;
  request.set_num_queries(50'000);
  request.set_num_keys(1);
  request.set_head_dim(1);
  request.set_value_dim(256);
  *request.mutable_q() = F32(Floats(50'000, 0));
  *request.mutable_k() = F32({0});
  *request.mutable_v() = F32(Floats(256, 1));
  v1::AttendResponse response;
  const grpc::Status status = Attend(request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(status), "MESSAGE_TOO_LARGE") << status.error_message();

  v1::SessionConfig config = MeanConfig();
  config.set_value_dim(256);
  v1::StepRequest step = MeanStep(Create(config), Floats(2000, 0));
  step.mutable_v()->mutable_data()->clear();
  step.clear_k();
  v1::StepResponse step_response;
  EXPECT_EQ(ReasonOf(Step(step, &step_response)), "MESSAGE_TOO_LARGE");
}

TEST_F(ValidationTest, WeightsAreBounded) {
  StartServer();
  v1::AttendRequest request;
  request.set_num_queries(5000);
  request.set_num_keys(5000);
  request.set_head_dim(1);
  *request.mutable_q() = F32(Floats(5000, 0));
  *request.mutable_k() = F32(Floats(5000, 0));
  *request.mutable_v() = F32(Floats(5000, 0));
  request.set_return_weights(true);
  Refused(request);
}

TEST_F(ValidationTest, V03_ConfigurationsBeyondReasonAreRefused) {
  StartServer();
  for (const auto& change : std::vector<std::function<void(v1::SessionConfig*)>>{
           [](v1::SessionConfig* c) { c->set_max_tokens(int64_t{1} << 40); },
           [](v1::SessionConfig* c) { c->set_max_tokens(-1); },
           [](v1::SessionConfig* c) { c->set_reserve_tokens(int64_t{1} << 40); },
           [](v1::SessionConfig* c) { c->set_num_layers(0); },
           [](v1::SessionConfig* c) { c->set_num_layers(2'000'000'000); },
           [](v1::SessionConfig* c) { c->set_num_q_heads(2'147'483'647); },
           [](v1::SessionConfig* c) { c->set_head_dim(0); },
           [](v1::SessionConfig* c) { c->set_head_dim(1 << 30); },
           [](v1::SessionConfig* c) { c->add_layer_windows(1), c->add_layer_windows(1); },
           [](v1::SessionConfig* c) { c->add_layer_windows(-1); },
           [](v1::SessionConfig* c) { c->mutable_ttl()->set_seconds(-5); },
           [](v1::SessionConfig* c) { c->set_kv_dtype(static_cast<v1::KvDType>(99)); },
       }) {
    grpc::ClientContext context;
    v1::CreateSessionRequest request;
    *request.mutable_config() = MeanConfig();
    change(request.mutable_config());
    v1::Session session;
    const grpc::Status status = stub_->CreateSession(&context, request, &session);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << request.ShortDebugString();
    EXPECT_EQ(ReasonOf(status), "BAD_CONFIG") << status.error_message();
  }
  EXPECT_EQ(Metric("attnd_sessions_active"), 0);
  EXPECT_EQ(Metric("attnd_kv_cache_reserved_bytes"), 0);
}

TEST_F(ValidationTest, StepShapesThatWrapOrDisagree) {
  StartServer();
  const std::string id = Create();
  for (const auto& change : std::vector<std::function<void(v1::StepRequest*)>>{
           [](v1::StepRequest* r) { r->mutable_segments(0)->set_num_tokens(0); },
           [](v1::StepRequest* r) { r->mutable_segments(0)->set_num_tokens(-1); },
           [](v1::StepRequest* r) { r->mutable_segments(0)->set_num_tokens(int64_t{1} << 62); },
           [](v1::StepRequest* r) { r->mutable_segments(0)->set_num_tokens(4611686018427387905); },
           [](v1::StepRequest* r) { r->mutable_segments(0)->set_num_tokens(3); },
           [](v1::StepRequest* r) { r->set_layer(-1); },
           [](v1::StepRequest* r) { r->set_layer(1); },
           [](v1::StepRequest* r) { r->clear_segments(); },
           [](v1::StepRequest* r) { r->clear_v(); },
           [](v1::StepRequest* r) { r->clear_q(), r->clear_k(), r->clear_v(); },
           [](v1::StepRequest* r) { r->mutable_q()->set_dtype(v1::DTYPE_BF16); },
           [](v1::StepRequest* r) { r->mutable_k()->mutable_data()->pop_back(); },
           [](v1::StepRequest* r) { r->mutable_segments(0)->mutable_mask()->set_rows(2); },
           [](v1::StepRequest* r) { *r->add_segments() = r->segments(0); },
       }) {
    v1::StepRequest request = MeanStep(id, {1, 2});
    change(&request);
    v1::StepResponse response;
    const grpc::Status status = Step(request, &response);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT)
        << request.ShortDebugString() << " " << status.error_message();
    EXPECT_NE(ReasonOf(status), "");
  }
  EXPECT_EQ(Get(id).length(), 0);
  EXPECT_EQ(Mean(id, {4}), Floats({4}));
}

}  // namespace
}  // namespace attnd::testing

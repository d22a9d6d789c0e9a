// The stateless call: the numbers of the project's first text (tests/conformance/seed.json), and what is refused.
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/service/harness.h"

namespace attnd::testing {
namespace {

using google::protobuf::Struct;
using google::protobuf::Value;
using grpc::StatusCode;

struct Matrix {
  int64_t rows = 0, columns = 0;
  Floats values;
};

class AttendTest : public ServiceTest {
 protected:
  static Struct ReadSeed() {
    std::ifstream file(ATTND_CONFORMANCE_DIR "/seed.json");
    std::stringstream text;
    text << file.rdbuf();
    Struct seed;
    EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(text.str(), &seed).ok());
    return seed;
  }

  // `name` as numbers, or of ones in the shape `name`_shape.
  static Matrix ReadMatrix(const Struct& entry, const std::string& name) {
    Matrix matrix;
    const auto shape = entry.fields().find(name + "_shape");
    if (shape != entry.fields().end()) {
      matrix.rows = static_cast<int64_t>(shape->second.list_value().values(0).number_value());
      matrix.columns = static_cast<int64_t>(shape->second.list_value().values(1).number_value());
      matrix.values.assign(matrix.rows * matrix.columns, 1.0f);
      return matrix;
    }
    const auto found = entry.fields().find(name);
    if (found == entry.fields().end()) return matrix;
    for (const Value& row : found->second.list_value().values()) {
      ++matrix.rows;
      matrix.columns = row.list_value().values_size();
      for (const Value& value : row.list_value().values()) matrix.values.push_back(ReadNumber(value));
    }
    return matrix;
  }

  static float ReadNumber(const Value& value) {
    if (value.kind_case() == Value::kStringValue) return std::strtof(value.string_value().c_str(), nullptr);
    if (value.kind_case() == Value::kBoolValue) return value.bool_value() ? 1 : 0;
    return static_cast<float>(value.number_value());
  }

  static v1::AttendRequest ReadRequest(const Struct& entry) {
    const Matrix q = ReadMatrix(entry, "q"), k = ReadMatrix(entry, "k"), v = ReadMatrix(entry, "v");
    v1::AttendRequest request;
    request.set_num_queries(q.rows);
    request.set_num_keys(k.rows);
    request.set_head_dim(static_cast<int>(q.columns));
    request.set_value_dim(static_cast<int>(v.columns));
    *request.mutable_q() = F32(q.values);
    *request.mutable_k() = F32(k.values);
    *request.mutable_v() = F32(v.values);
    const auto& fields = entry.fields();
    if (fields.contains("scale")) request.mutable_softmax()->set_softmax_scale(ReadNumber(fields.at("scale")));
    if (fields.contains("causal")) request.mutable_softmax()->set_causal(fields.at("causal").bool_value());
    if (fields.contains("mask")) SetMask(ReadMatrix(entry, "mask"), &request);
    request.set_return_weights(true);
    request.set_return_lse(true);
    return request;
  }

  static void SetMask(const Matrix& mask, v1::AttendRequest* request) {
    request->mutable_mask()->set_rows(mask.rows);
    request->mutable_mask()->set_columns(mask.columns);
    std::string bits((mask.values.size() + 7) / 8, '\0');
    for (size_t i = 0; i < mask.values.size(); ++i) {
      if (mask.values[i] != 0) bits[i / 8] = static_cast<char>(bits[i / 8] | (1 << (i % 8)));
    }
    request->mutable_mask()->set_bits(bits);
  }

  static void ExpectNear(const Floats& actual, const Matrix& expected, const std::string& what) {
    ASSERT_EQ(actual.size(), expected.values.size()) << what;
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_NEAR(actual[i], expected.values[i], 1e-5 * std::max(1.0f, std::abs(expected.values[i]))) << what;
    }
  }

  // One query, D = 1, unit scale.
  static v1::AttendRequest Row(float q, const Floats& k, const Floats& v) {
    v1::AttendRequest request;
    request.set_num_queries(1);
    request.set_num_keys(static_cast<int64_t>(k.size()));
    request.set_head_dim(1);
    *request.mutable_q() = F32({q});
    *request.mutable_k() = F32(k);
    *request.mutable_v() = F32(v);
    request.mutable_softmax()->set_softmax_scale(1);
    return request;
  }

  float Value1(const v1::AttendRequest& request) {
    v1::AttendResponse response;
    const grpc::Status status = Attend(request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    const Floats out = ToFloats(response.out());
    return out.size() == 1 ? out[0] : std::numeric_limits<float>::quiet_NaN();
  }

  grpc::Status Refused(const v1::AttendRequest& request) {
    v1::AttendResponse response;
    grpc::Status status = Attend(request, &response);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
    return status;
  }
};

TEST_F(AttendTest, SeedAnswers) {
  StartServer();
  const Struct seed = ReadSeed();
  ASSERT_EQ(seed.fields().at("attend").list_value().values_size(), 6);
  for (const Value& value : seed.fields().at("attend").list_value().values()) {
    const Struct& entry = value.struct_value();
    const std::string name = entry.fields().at("name").string_value();
    v1::AttendResponse response;
    const grpc::Status status = Attend(ReadRequest(entry), &response);
    ASSERT_TRUE(status.ok()) << name << ": " << status.error_message();
    for (const char* what : {"out", "weights"}) {
      const Floats actual = ToFloats(what == std::string("out") ? response.out() : response.weights());
      if (entry.fields().contains(absl::StrCat(what, "_shape"))) {
        EXPECT_EQ(actual.size(), ReadMatrix(entry, what).values.size()) << name;
      } else if (entry.fields().contains(what)) {
        ExpectNear(actual, ReadMatrix(entry, what), absl::StrCat(name, ", ", what));
      }
    }
  }
}

TEST_F(AttendTest, SeedRejections) {
  StartServer();
  const Struct seed = ReadSeed();
  ASSERT_EQ(seed.fields().at("rejected").list_value().values_size(), 6);
  for (const Value& value : seed.fields().at("rejected").list_value().values()) {
    const std::string name = value.struct_value().fields().at("name").string_value();
    const grpc::Status status = Refused(ReadRequest(value.struct_value()));
    EXPECT_NE(ReasonOf(status), "") << name;
  }
}

TEST_F(AttendTest, SeedAnswersThroughSessionsWhereCausal) {
  StartServer();
  const Struct seed = ReadSeed();
  for (const Value& value : seed.fields().at("attend").list_value().values()) {
    const Struct& entry = value.struct_value();
    if (!entry.fields().contains("causal")) continue;
    const v1::AttendRequest attend = ReadRequest(entry);
    v1::SessionConfig config = MeanConfig();
    config.set_head_dim(attend.head_dim());
    config.set_value_dim(attend.value_dim());
    v1::StepRequest request;
    v1::Segment* segment = request.add_segments();
    segment->set_session_id(Create(config));
    segment->set_num_tokens(attend.num_queries());
    *request.mutable_q() = attend.q();
    *request.mutable_k() = attend.k();
    *request.mutable_v() = attend.v();
    v1::StepResponse response;
    ASSERT_TRUE(Step(request, &response).ok());
    ExpectNear(ToFloats(response.out()), ReadMatrix(entry, "out"), entry.fields().at("name").string_value());
  }
}

TEST_F(AttendTest, SeedNoninterference) {
  StartServer();
  v1::AttendRequest request;
  request.set_num_queries(4);
  request.set_num_keys(4);
  request.set_head_dim(2);
  request.mutable_softmax()->set_causal(true);
  Floats q, k, v;
  for (int i = 0; i < 8; ++i) {
    q.push_back(0.3f * static_cast<float>(i % 5) - 0.7f);
    k.push_back(0.2f * static_cast<float>(i % 3) + 0.1f);
    v.push_back(1.5f * static_cast<float>(i) - 2.0f);
  }
  *request.mutable_q() = F32(q);
  *request.mutable_k() = F32(k);
  *request.mutable_v() = F32(v);
  v1::AttendResponse before, after;
  ASSERT_TRUE(Attend(request, &before).ok());
  k[6] = k[7] = 9;
  v[6] = v[7] = -50;
  *request.mutable_k() = F32(k);
  *request.mutable_v() = F32(v);
  ASSERT_TRUE(Attend(request, &after).ok());
  EXPECT_EQ(before.out().data().substr(0, 24), after.out().data().substr(0, 24));
  EXPECT_NE(before.out().data(), after.out().data());
}

TEST_F(AttendTest, K03_RowsWithNothingAllowed) {
  StartServer();
  v1::AttendRequest request = Row(0, {0, 0, 0}, {2, 4, 9});
  SetMask({1, 3, {0, 0, 0}}, &request);
  const grpc::Status refused = Refused(request);
  EXPECT_EQ(ReasonOf(refused), "EMPTY_ROW");
  EXPECT_NE(refused.error_message().find("0"), std::string::npos) << "names the row: " << refused.error_message();
  request.set_empty_rows(v1::EMPTY_ROWS_ZERO);
  request.set_return_lse(true);
  v1::AttendResponse response;
  ASSERT_TRUE(Attend(request, &response).ok());
  EXPECT_EQ(ToFloats(response.out()), Floats({0}));
  EXPECT_EQ(ToFloats(response.lse()), Floats({-std::numeric_limits<float>::infinity()}));
}

TEST_F(AttendTest, K26_MaskBitsAreAllowedPairs) {
  StartServer();
  v1::AttendRequest request = Row(0, {0, 0, 0}, {1, 10, 3});
  SetMask({1, 3, {1, 0, 1}}, &request);
  EXPECT_FLOAT_EQ(Value1(request), 2);
}

TEST_F(AttendTest, K05_LargeScores) {
  StartServer();
  EXPECT_NEAR(Value1(Row(1, {1000, 1001, 1002}, {1, 2, 3})), 2.5752104, 1e-5);
  EXPECT_NEAR(Value1(Row(1, {88, 89}, {1, 2})), 1.7310586, 1e-5);
  EXPECT_NEAR(Value1(Row(1, {3e38f, 3e38f}, {1, 2})), 1.5, 1e-5);
}

TEST_F(AttendTest, K17_UnsetAndZeroScaleDiffer) {
  StartServer();
  v1::AttendRequest request;
  request.set_num_queries(1);
  request.set_num_keys(2);
  request.set_head_dim(4);
  request.set_value_dim(1);
  *request.mutable_q() = F32({1, 1, 1, 1});
  const float x = 0.5493061f;
  *request.mutable_k() = F32({0, 0, 0, 0, x, x, x, x});
  *request.mutable_v() = F32({0, 4});
  EXPECT_NEAR(Value1(request), 3.0, 1e-5);
  request.mutable_softmax()->set_softmax_scale(0);
  EXPECT_NEAR(Value1(request), 2.0, 1e-5);
  request.mutable_softmax()->set_softmax_scale(1);
  EXPECT_NEAR(Value1(request), 3.6, 1e-5);
}

TEST_F(AttendTest, K18_SoftcapComesBeforeTheMask) {
  StartServer();
  v1::AttendRequest request = Row(1, {0, 5}, {0, 100});
  request.mutable_softmax()->set_softcap(1);
  SetMask({1, 2, {1, 0}}, &request);
  EXPECT_EQ(Value1(request), 0);
  request = Row(1, {100, 50}, {1, 2});
  request.mutable_softmax()->set_softcap(50);
  EXPECT_NEAR(Value1(request), 1.0000402, 3e-6);
}

TEST_F(AttendTest, K11_QueryHeadsAreGroupedNotTiled) {
  StartServer();
  v1::AttendRequest request;
  request.set_num_queries(1);
  request.set_num_keys(1);
  request.set_num_q_heads(4);
  request.set_num_kv_heads(2);
  request.set_head_dim(1);
  *request.mutable_q() = F32({0, 0, 0, 0});
  *request.mutable_k() = F32({0, 0});
  *request.mutable_v() = F32({10, 20});
  v1::AttendResponse response;
  ASSERT_TRUE(Attend(request, &response).ok());
  EXPECT_EQ(ToFloats(response.out()), Floats({10, 10, 20, 20}));
}

TEST_F(AttendTest, UnequalLengthsNeedAnOffset) {
  StartServer();
  v1::AttendRequest request = Row(0, {0, 0, 0}, {1, 2, 6});
  EXPECT_FLOAT_EQ(Value1(request), 3);
  request.mutable_softmax()->set_causal(true);
  EXPECT_EQ(ReasonOf(Refused(request)), "BAD_SHAPE");
  request.set_query_offset(1);
  EXPECT_FLOAT_EQ(Value1(request), 1.5);
  request.mutable_softmax()->set_causal(false);
  request.mutable_softmax()->set_window(1);
  request.clear_query_offset();
  Refused(request);
  request.mutable_softmax()->clear_window();
  request.mutable_softmax()->add_alibi_slopes(0.5);
  Refused(request);
  request.set_query_offset(-1);
  Refused(request);
}

TEST_F(AttendTest, OptionsOutOfRange) {
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
  bad.set_kv_dtype(v1::KV_DTYPE_INT8);
  Refused(bad);
  bad = good;
  bad.mutable_mask()->set_rows(1);
  bad.mutable_mask()->set_columns(2);
  Refused(bad);
}

// V01: products that wrap, bytes that do not fit, all refused quickly and without memory.
TEST_F(AttendTest, V01_ShapesThatWrapOrDisagree) {
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
  EXPECT_FLOAT_EQ(Value1(Row(0, {0}, {4})), 4) << "still alive";
}

TEST_F(AttendTest, V03_AnswersThatCannotBeSentAreRefusedBeforeTheyAreMade) {
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

TEST_F(AttendTest, WeightsAreBounded) {
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

TEST_F(AttendTest, V03_ConfigurationsBeyondReasonAreRefused) {
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
           [](v1::SessionConfig* c) { c->set_kv_dtype(v1::KV_DTYPE_INT8); },
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

TEST_F(AttendTest, StepShapesThatWrapOrDisagree) {
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

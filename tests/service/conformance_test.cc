// The numbers of the project's first text (tests/conformance/seed.json), through the stateless call and, where it
// applies, through sessions.
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "tests/service/attend_fixture.h"

namespace attnd::testing {
namespace {

using google::protobuf::Struct;
using google::protobuf::Value;

class ConformanceTest : public AttendFixture {
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

  static void ExpectNear(const Floats& actual, const Matrix& expected, const std::string& what) {
    ASSERT_EQ(actual.size(), expected.values.size()) << what;
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_NEAR(actual[i], expected.values[i], 1e-5 * std::max(1.0f, std::abs(expected.values[i]))) << what;
    }
  }
};

TEST_F(ConformanceTest, SeedAnswers) {
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

TEST_F(ConformanceTest, SeedRejections) {
  StartServer();
  const Struct seed = ReadSeed();
  ASSERT_EQ(seed.fields().at("rejected").list_value().values_size(), 6);
  for (const Value& value : seed.fields().at("rejected").list_value().values()) {
    const std::string name = value.struct_value().fields().at("name").string_value();
    const grpc::Status status = Refused(ReadRequest(value.struct_value()));
    EXPECT_NE(ReasonOf(status), "") << name;
  }
}

TEST_F(ConformanceTest, SeedAnswersThroughSessionsWhereCausal) {
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

TEST_F(ConformanceTest, SeedNoninterference) {
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

}  // namespace
}  // namespace attnd::testing

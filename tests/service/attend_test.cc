// The stateless call. Scenario names (K03, ...) are those of the list of failures that people have reported.
#include <limits>

#include "tests/service/attend_fixture.h"

namespace attnd::testing {
namespace {

class AttendTest : public AttendFixture {};

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

}  // namespace
}  // namespace attnd::testing

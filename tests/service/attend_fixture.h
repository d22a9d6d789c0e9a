// Short verbs for the stateless call.
#ifndef ATTND_TESTS_SERVICE_ATTEND_FIXTURE_H_
#define ATTND_TESTS_SERVICE_ATTEND_FIXTURE_H_

#include <limits>
#include <string>

#include "tests/service/harness.h"

namespace attnd::testing {

struct Matrix {
  int64_t rows = 0, columns = 0;
  Floats values;
};

class AttendFixture : public ServiceTest {
 protected:
  static void SetMask(const Matrix& mask, v1::AttendRequest* request) {
    request->mutable_mask()->set_rows(mask.rows);
    request->mutable_mask()->set_columns(mask.columns);
    std::string bits((mask.values.size() + 7) / 8, '\0');
    for (size_t i = 0; i < mask.values.size(); ++i) {
      if (mask.values[i] != 0) bits[i / 8] = static_cast<char>(bits[i / 8] | (1 << (i % 8)));
    }
    request->mutable_mask()->set_bits(bits);
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
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    return status;
  }
};

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVICE_ATTEND_FIXTURE_H_

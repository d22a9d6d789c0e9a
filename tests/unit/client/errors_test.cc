#include "client/cpp/errors.h"

#include <gtest/gtest.h>

#include "attnd/v1/attnd.pb.h"
#include "attnd/v1/error_details.pb.h"
#include "client/cpp/internal/status.h"

namespace attnd::client {
namespace {

constexpr int kNotFound = 5, kExhausted = 8, kPrecondition = 9;

std::string Details() {
  v1::ErrorStatus status;
  status.set_code(kPrecondition);
  v1::ErrorInfo info;
  info.set_reason("BAD_POSITION");
  info.set_domain("attnd");
  (*info.mutable_metadata())["length"] = "576";
  auto* detail = status.add_details();
  detail->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  detail->set_value(info.SerializeAsString());
  return status.SerializeAsString();
}

TEST(Errors, DetailsOfACallAreDecoded) {
  const absl::Status status = internal::FromParts(kPrecondition, "position 3, length 576", Details());
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_EQ(status.message(), "position 3, length 576");
  const ErrorDetails details = GetErrorDetails(status);
  EXPECT_EQ(details.reason, "BAD_POSITION");
  EXPECT_EQ(details.domain, "attnd");
  EXPECT_EQ(details.metadata.at("length"), "576");
  EXPECT_FALSE(details.retry_delay.has_value());
}

TEST(Errors, BrokenDetailsLeaveCodeAndMessage) {
  const absl::Status status = internal::FromParts(kExhausted, "full", "\xFF\xFF not a message");
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_EQ(GetErrorDetails(status).reason, "");
}

TEST(Errors, AStepsStatusIsDecodedLikeACalls) {
  v1::StepStatus wire;
  EXPECT_TRUE(internal::FromWire(wire).ok());
  wire.set_code(kExhausted);
  wire.set_message("queue full");
  wire.set_reason("QUEUE_FULL");
  wire.mutable_retry_delay()->set_nanos(250'000'000);
  const absl::Status status = internal::FromWire(wire);
  EXPECT_EQ(GetErrorDetails(status).reason, "QUEUE_FULL");
  EXPECT_EQ(GetErrorDetails(status).retry_delay, absl::Milliseconds(250));
}

TEST(Errors, AnAbsentSessionIsALostOneAndSoIsOneWhoseFileIsDamaged) {
  v1::StepStatus wire;
  wire.set_code(kNotFound);
  EXPECT_FALSE(IsSessionLost(internal::FromWire(wire)));
  for (const char* reason : {"NEVER_EXISTED", "EXPIRED", "EVICTED", "CLOSED"}) {
    wire.set_reason(reason);
    EXPECT_TRUE(IsSessionLost(internal::FromWire(wire))) << reason;
    EXPECT_EQ(GetErrorDetails(internal::ExplainLostSession(internal::FromWire(wire))).reason, reason);
  }
  wire.set_code(static_cast<int>(absl::StatusCode::kDataLoss));
  EXPECT_FALSE(IsSessionLost(internal::FromWire(wire)));  // a damaged answer, say
  wire.set_reason("SPILL_DAMAGED");
  EXPECT_TRUE(IsSessionLost(internal::FromWire(wire)));
  EXPECT_FALSE(IsSessionLost(absl::OkStatus()));
}

}  // namespace
}  // namespace attnd::client

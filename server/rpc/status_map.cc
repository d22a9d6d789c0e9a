#include "server/rpc/status_map.h"

#include <cassert>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "attnd/v1/error_details.pb.h"
#include "server/engine/errors.h"
#include "server/rpc/convert.h"

namespace attnd {
namespace {

constexpr absl::string_view kErrorInfoUrl = "type.googleapis.com/google.rpc.ErrorInfo";
constexpr absl::string_view kRetryInfoUrl = "type.googleapis.com/google.rpc.RetryInfo";

void AddDetail(absl::string_view type_url, const google::protobuf::Message& detail, v1::ErrorStatus* status) {
  google::protobuf::Any* any = status->add_details();
  any->set_type_url(std::string(type_url));
  any->set_value(detail.SerializeAsString());
}

std::string BinaryDetails(const absl::Status& status, const ErrorDetails& details) {
  v1::ErrorStatus wire;
  wire.set_code(static_cast<int>(status.code()));
  wire.set_message(std::string(status.message()));
  v1::ErrorInfo info;
  info.set_reason(details.reason);
  info.set_domain("attnd");
  for (const auto& [key, value] : details.metadata) (*info.mutable_metadata())[key] = value;
  AddDetail(kErrorInfoUrl, info, &wire);
  if (details.retry_delay > absl::ZeroDuration()) {
    v1::RetryInfo retry;
    *retry.mutable_retry_delay() = ToProtoDuration(details.retry_delay);
    AddDetail(kRetryInfoUrl, retry, &wire);
  }
  return wire.SerializeAsString();
}

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const auto code = static_cast<grpc::StatusCode>(status.code());  // the same numbers by design of both
  const ErrorDetails details = GetErrorDetails(status);
  if (details.reason.empty()) return grpc::Status(code, std::string(status.message()));
  return grpc::Status(code, std::string(status.message()), BinaryDetails(status, details));
}

void FillStepStatus(const absl::Status& status, v1::StepStatus* out) {
  assert(!status.ok());
  const ErrorDetails details = GetErrorDetails(status);
  out->set_code(static_cast<int>(status.code()));
  out->set_message(std::string(status.message()));
  out->set_reason(details.reason);
  for (const auto& [key, value] : details.metadata) (*out->mutable_metadata())[key] = value;
  if (details.retry_delay > absl::ZeroDuration()) *out->mutable_retry_delay() = ToProtoDuration(details.retry_delay);
}

}  // namespace attnd

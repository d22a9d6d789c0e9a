#include "client/cpp/internal/status.h"

#include <google/protobuf/any.pb.h>
#include <grpcpp/support/status.h>

#include <map>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "attnd/v1/attnd.pb.h"
#include "attnd/v1/error_details.pb.h"
#include "client/cpp/errors.h"

namespace attnd::client {
namespace {

constexpr char kErrorInfoUrl[] = "type.googleapis.com/google.rpc.ErrorInfo";
constexpr char kRetryInfoUrl[] = "type.googleapis.com/google.rpc.RetryInfo";

}  // namespace

ErrorDetails GetErrorDetails(const absl::Status& status) {
  ErrorDetails details;
  if (auto payload = status.GetPayload(kErrorInfoUrl); payload.has_value()) {
    v1::ErrorInfo info;
    if (info.ParseFromString(std::string(*payload))) {
      details.reason = info.reason();
      details.domain = info.domain();
      details.metadata = {info.metadata().begin(), info.metadata().end()};
    }
  }
  if (auto payload = status.GetPayload(kRetryInfoUrl); payload.has_value()) {
    v1::RetryInfo info;
    if (info.ParseFromString(std::string(*payload))) {
      details.retry_delay = absl::Seconds(info.retry_delay().seconds()) + absl::Nanoseconds(info.retry_delay().nanos());
    }
  }
  return details;
}

bool IsSessionLost(const absl::Status& status) {
  const std::string reason = GetErrorDetails(status).reason;
  if (absl::IsDataLoss(status)) return reason == "SPILL_DAMAGED";
  if (!absl::IsNotFound(status)) return false;
  return reason == "NEVER_EXISTED" || reason == "EXPIRED" || reason == "EVICTED" || reason == "CLOSED";
}

namespace internal {
namespace {

absl::Status WithDetails(int code, const std::string& message, const v1::ErrorInfo* info, const v1::RetryInfo* retry) {
  absl::Status status(static_cast<absl::StatusCode>(code), message);
  if (info != nullptr) status.SetPayload(kErrorInfoUrl, absl::Cord(info->SerializeAsString()));
  if (retry != nullptr) status.SetPayload(kRetryInfoUrl, absl::Cord(retry->SerializeAsString()));
  return status;
}

}  // namespace

absl::Status FromParts(int code, const std::string& message, const std::string& details_bytes) {
  absl::Status status(static_cast<absl::StatusCode>(code), message);
  v1::ErrorStatus details;
  if (status.ok() || details_bytes.empty() || !details.ParseFromString(details_bytes)) return status;
  for (const google::protobuf::Any& detail : details.details()) {
    status.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return status;
}

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return FromParts(status.error_code(), status.error_message(), status.error_details());
}

absl::Status FromWire(const v1::StepStatus& status) {
  if (status.code() == 0) return absl::OkStatus();
  v1::ErrorInfo info;
  info.set_reason(status.reason());
  info.set_domain("attnd");
  *info.mutable_metadata() = status.metadata();
  v1::RetryInfo retry;
  if (status.has_retry_delay()) *retry.mutable_retry_delay() = status.retry_delay();
  return WithDetails(status.code(), status.message(), status.reason().empty() ? nullptr : &info,
                     status.has_retry_delay() ? &retry : nullptr);
}

absl::Status ClientError(absl::StatusCode code, absl::string_view reason, const std::string& message) {
  v1::ErrorInfo info;
  info.set_reason(std::string(reason));
  info.set_domain("attnd.client");
  return WithDetails(static_cast<int>(code), message, &info, nullptr);
}

absl::Status ExplainLostSession(const absl::Status& status) {
  if (!IsSessionLost(status)) return status;
  absl::Status explained(status.code(),
                         absl::StrCat("session lost, replay needed: ", status.message(),
                                      " (create another session and send its tokens again from position 0)"));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) { explained.SetPayload(url, payload); });
  return explained;
}

}  // namespace internal
}  // namespace attnd::client

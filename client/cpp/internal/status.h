// From gRPC's statuses and the wire's StepStatus to absl::Status with payloads, the one place where that happens.
#ifndef ATTND_CLIENT_CPP_INTERNAL_STATUS_H_
#define ATTND_CLIENT_CPP_INTERNAL_STATUS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace grpc {
class Status;
}
namespace attnd::v1 {
class StepStatus;
}

namespace attnd::client::internal {

// From code, message and the bytes of grpc-status-details-bin (a google.rpc.Status; ignored when it does not parse).
absl::Status FromParts(int code, const std::string& message, const std::string& details_bytes);
absl::Status FromGrpc(const grpc::Status& status);
absl::Status FromWire(const v1::StepStatus& status);

// An error of the client's own: domain "attnd.client".
absl::Status ClientError(absl::StatusCode code, absl::string_view reason, const std::string& message);

// A session's NOT_FOUND, told as what it means to the caller; other statuses unchanged.
absl::Status ExplainLostSession(const absl::Status& status);

}  // namespace attnd::client::internal

#endif  // ATTND_CLIENT_CPP_INTERNAL_STATUS_H_

// Between the client's plain types and the wire's messages.
#ifndef ATTND_CLIENT_CPP_INTERNAL_CONVERT_H_
#define ATTND_CLIENT_CPP_INTERNAL_CONVERT_H_

#include "absl/status/statusor.h"
#include "client/cpp/requests.h"
#include "client/cpp/types.h"

namespace attnd::v1 {
class AttendBackwardRequest;
class AttendBackwardResponse;
class AttendRequest;
class AttendResponse;
class ServerInfo;
class Session;
class SessionConfig;
class StepRequest;
class StepResponse;
}  // namespace attnd::v1

namespace attnd::client::internal {

void ToWire(const SessionConfig& config, v1::SessionConfig* wire);
void ToWire(const StepRequest& request, v1::StepRequest* wire);
void ToWire(const AttendRequest& request, v1::AttendRequest* wire);
void ToWire(const AttendBackwardRequest& request, v1::AttendBackwardRequest* wire);

// These take what they can from the message instead of copying it. INTERNAL: an answer that does not make sense
// (an unknown dtype, a byte count that is no multiple of the element size), as from a newer server.
absl::StatusOr<SessionInfo> FromWire(const v1::Session& wire);
absl::StatusOr<StepResult> FromWire(v1::StepResponse&& wire);
absl::StatusOr<AttendResult> FromWire(v1::AttendResponse&& wire);
absl::StatusOr<AttendGradients> FromWire(v1::AttendBackwardResponse&& wire);
ServerInfo FromWire(const v1::ServerInfo& wire);

}  // namespace attnd::client::internal

#endif  // ATTND_CLIENT_CPP_INTERNAL_CONVERT_H_

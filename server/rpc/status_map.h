// The one place where a status with reason becomes what goes over the wire: a grpc::Status with a google.rpc.Status in
// its binary details, or a StepStatus inside an answer. Stateless and thread-safe.
#ifndef ATTND_SERVER_RPC_STATUS_MAP_H_
#define ATTND_SERVER_RPC_STATUS_MAP_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "attnd/v1/attnd.pb.h"

namespace attnd {

grpc::Status ToGrpcStatus(const absl::Status& status);

// REQUIRES: !status.ok().
void FillStepStatus(const absl::Status& status, v1::StepStatus* out);

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_STATUS_MAP_H_

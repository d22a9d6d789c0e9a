// Between the wire's messages and the engine's structs, for values that have already been validated. Stateless and
// thread-safe.
#ifndef ATTND_SERVER_RPC_CONVERT_H_
#define ATTND_SERVER_RPC_CONVERT_H_

#include <google/protobuf/duration.pb.h>
#include <google/protobuf/timestamp.pb.h>

#include "absl/time/time.h"
#include "attnd/v1/attnd.pb.h"
#include "kernels/types.h"
#include "server/engine/engine.h"

namespace attnd {

google::protobuf::Duration ToProtoDuration(absl::Duration duration);  // clamped to what a Duration can hold
google::protobuf::Timestamp ToProtoTimestamp(absl::Time time);

// REQUIRES: one of the named types.
DType FromProto(v1::DType dtype);
v1::DType ToProto(DType dtype);
KvDType FromProto(v1::KvDType dtype);  // UNSPECIFIED is F32
v1::KvDType ToProto(KvDType dtype);

void ToProto(const SessionConfig& config, v1::SessionConfig* out);
void ToProto(const SessionInfo& info, v1::Session* out);

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_CONVERT_H_

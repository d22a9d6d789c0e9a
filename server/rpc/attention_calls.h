// Attend, AttendBackward and Step. See unary_call.h for their life.
#ifndef ATTND_SERVER_RPC_ATTENTION_CALLS_H_
#define ATTND_SERVER_RPC_ATTENTION_CALLS_H_

#include "attnd/v1/attnd.pb.h"
#include "server/rpc/unary_call.h"

namespace attnd {

class AttendCall final : public UnaryCall<v1::AttendRequest, v1::AttendResponse> {
 public:
  AttendCall(ServiceState* state, grpc::CallbackServerContext* context)
      : UnaryCall(state, RpcMethod::kAttend, context) {}

 private:
  void Handle() override;
};

class AttendBackwardCall final : public UnaryCall<v1::AttendBackwardRequest, v1::AttendBackwardResponse> {
 public:
  AttendBackwardCall(ServiceState* state, grpc::CallbackServerContext* context)
      : UnaryCall(state, RpcMethod::kAttendBackward, context) {}

 private:
  void Handle() override;
};

class StepCall final : public UnaryCall<v1::StepRequest, v1::StepResponse> {
 public:
  StepCall(ServiceState* state, grpc::CallbackServerContext* context) : UnaryCall(state, RpcMethod::kStep, context) {}

 private:
  void Handle() override;
};

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_ATTENTION_CALLS_H_

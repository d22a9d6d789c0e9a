// The calls that are not attention: sessions and the server's description. See unary_call.h for their life.
#ifndef ATTND_SERVER_RPC_SESSION_CALLS_H_
#define ATTND_SERVER_RPC_SESSION_CALLS_H_

#include "attnd/v1/attnd.pb.h"
#include "server/rpc/unary_call.h"

namespace attnd {

class CreateSessionCall final : public UnaryCall<v1::CreateSessionRequest, v1::Session> {
 public:
  CreateSessionCall(ServiceState* state, grpc::CallbackServerContext* context)
      : UnaryCall(state, RpcMethod::kCreateSession, context) {}

 private:
  void Handle() override;
};

class RewindSessionCall final : public UnaryCall<v1::RewindSessionRequest, v1::Session> {
 public:
  RewindSessionCall(ServiceState* state, grpc::CallbackServerContext* context)
      : UnaryCall(state, RpcMethod::kRewindSession, context) {}

 private:
  void Handle() override;
};

class ForkSessionCall final : public UnaryCall<v1::ForkSessionRequest, v1::Session> {
 public:
  ForkSessionCall(ServiceState* state, grpc::CallbackServerContext* context)
      : UnaryCall(state, RpcMethod::kForkSession, context) {}

 private:
  void Handle() override;
};

class ReorderSessionsCall final : public UnaryCall<v1::ReorderSessionsRequest, v1::ReorderSessionsResponse> {
 public:
  ReorderSessionsCall(ServiceState* state, grpc::CallbackServerContext* context)
      : UnaryCall(state, RpcMethod::kReorderSessions, context) {}

 private:
  void Handle() override;
};

class GetSessionCall final : public UnaryCall<v1::GetSessionRequest, v1::Session> {
 public:
  GetSessionCall(ServiceState* state, grpc::CallbackServerContext* context)
      : UnaryCall(state, RpcMethod::kGetSession, context) {}

 private:
  void Handle() override;
};

class ListSessionsCall final : public UnaryCall<v1::ListSessionsRequest, v1::ListSessionsResponse> {
 public:
  ListSessionsCall(ServiceState* state, grpc::CallbackServerContext* context)
      : UnaryCall(state, RpcMethod::kListSessions, context) {}

 private:
  void Handle() override;
};

class CloseSessionCall final : public UnaryCall<v1::CloseSessionRequest, v1::CloseSessionResponse> {
 public:
  CloseSessionCall(ServiceState* state, grpc::CallbackServerContext* context)
      : UnaryCall(state, RpcMethod::kCloseSession, context) {}

 private:
  void Handle() override;
};

class GetServerInfoCall final : public UnaryCall<v1::GetServerInfoRequest, v1::ServerInfo> {
 public:
  GetServerInfoCall(ServiceState* state, grpc::CallbackServerContext* context)
      : UnaryCall(state, RpcMethod::kGetServerInfo, context) {}

 private:
  void Handle() override;
  bool ServedWhileDraining() const override { return true; }  // its answer says that the server drains
};

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_SESSION_CALLS_H_

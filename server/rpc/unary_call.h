// The reactor of a unary call, for every method: lets the call in, parses, calls Handle, answers, accounts.
//
// The raw (bytes) form of the callback API is used so that what cannot be parsed is answered INVALID_ARGUMENT and
// counted (the typed form answers UNIMPLEMENTED before any code of ours runs), and so that the wire's bytes are freed
// as soon as they are parsed.
//
// Lifetime: deletes itself in OnDone, which gRPC calls after the answer was sent. Until FinishWith is called the
// request's and response's memory is stable, so the engine reads and writes it directly. FinishWith must be called
// exactly once, from any thread, and nothing of the call may be touched after it.
#ifndef ATTND_SERVER_RPC_UNARY_CALL_H_
#define ATTND_SERVER_RPC_UNARY_CALL_H_

#include <google/protobuf/message.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/rpc/call_scope.h"
#include "server/rpc/service_state.h"

namespace attnd {

// INVALID_ARGUMENT (MALFORMED) when the bytes are no such message. Frees the bytes.
absl::Status ParseMessage(grpc::ByteBuffer* bytes, google::protobuf::Message* message);
grpc::ByteBuffer SerializeMessage(const google::protobuf::Message& message);

absl::Time DeadlineOf(const grpc::CallbackServerContext& context);
// Whether a call may come in: UNAVAILABLE while draining, UNAUTHENTICATED without a token where one is asked for.
absl::Status Admit(const ServiceState& state, const grpc::CallbackServerContext& context, bool served_while_draining);
// What a call that was cancelled counts as: its client went away, or its deadline passed.
absl::StatusCode CancelCode(const grpc::CallbackServerContext& context);

// All that does not depend on the message types.
class UnaryCallBase : public grpc::ServerUnaryReactor {
 public:
  UnaryCallBase(ServiceState* state, RpcMethod method, grpc::CallbackServerContext* context);

  void Start(const grpc::ByteBuffer* in, grpc::ByteBuffer* out, google::protobuf::Message* request);
  void OnCancel() override;
  void OnDone() override { delete this; }

 protected:
  virtual void Handle() = 0;
  // Also GetServerInfo's way to tell that the server drains.
  virtual bool ServedWhileDraining() const { return false; }

  // Touches nothing of this once gRPC has the answer.
  void Finish(const absl::Status& status, const google::protobuf::Message& response);

  ServiceState& state() { return *state_; }
  Engine& engine() { return *state_->engine; }
  // Before memory for an answer is taken, from the thread that called Handle.
  absl::Status ReserveAnswer(int64_t bytes) { return scope_.Reserve(bytes); }
  absl::Time deadline() const { return DeadlineOf(*context_); }
  const std::shared_ptr<CancelToken>& cancel() const { return cancel_; }

 private:
  ServiceState* const state_;
  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer* out_ = nullptr;
  std::shared_ptr<CancelToken> cancel_ = std::make_shared<CancelToken>();
  CallScope scope_;
};

template <typename RequestType, typename ResponseType>
class UnaryCall : public UnaryCallBase {
 public:
  using UnaryCallBase::UnaryCallBase;
  using Request = RequestType;
  using Response = ResponseType;

  void Start(const grpc::ByteBuffer* in, grpc::ByteBuffer* out) { UnaryCallBase::Start(in, out, &request_); }

 protected:
  const Request& request() const { return request_; }
  Response& response() { return response_; }
  void FinishWith(const absl::Status& status) {
    // Freed when the answer is on its way, and not when it was written: a client may be slow to take it.
    const Request request = std::move(request_);
    const Response response = std::move(response_);
    Finish(status, response);
  }

 private:
  Request request_;
  Response response_;
};

// Creates and starts a call; the reactor belongs to itself.
template <typename Call>
grpc::ServerUnaryReactor* StartCall(ServiceState* state, grpc::CallbackServerContext* context,
                                    const grpc::ByteBuffer* in, grpc::ByteBuffer* out) {
  auto* call = new Call(state, context);
  call->Start(in, out);
  return call;
}

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_UNARY_CALL_H_

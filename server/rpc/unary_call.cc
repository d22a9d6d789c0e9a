#include "server/rpc/unary_call.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attnd/v1/attnd.pb.h"
#include "server/engine/errors.h"
#include "server/rpc/auth.h"
#include "server/rpc/status_map.h"
#include "server/rpc/validate.h"

namespace attnd {

absl::Status ParseMessage(grpc::ByteBuffer* bytes, google::protobuf::Message* message) {
  if (!bytes->Valid()) return InvalidArgument("MALFORMED", "the call has no message");
  const size_t size = bytes->Length();
  bool parsed = false;
  {
    grpc::ProtoBufferReader reader(bytes);
    parsed = reader.status().ok() && message->ParseFromZeroCopyStream(&reader);
  }
  bytes->Clear();
  if (parsed) return absl::OkStatus();
  return InvalidArgument("MALFORMED", absl::StrCat("the ", size, " bytes sent are not a ", message->GetTypeName()));
}

grpc::ByteBuffer SerializeMessage(const google::protobuf::Message& message) {
  grpc::Slice slice(message.ByteSizeLong());
  message.SerializeWithCachedSizesToArray(const_cast<uint8_t*>(slice.begin()));  // ours alone until it is sent
  return grpc::ByteBuffer(&slice, 1);
}

absl::Time DeadlineOf(const grpc::CallbackServerContext& context) {
  const auto deadline = context.deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) return absl::InfiniteFuture();
  return absl::FromChrono(deadline);
}

absl::Status Admit(const ServiceState& state, const grpc::CallbackServerContext& context, bool served_while_draining) {
  if (state.admission.draining() && !served_while_draining) return Admission::DrainingError();
  if (state.options.tokens == nullptr) return absl::OkStatus();
  const auto header = context.client_metadata().find("authorization");
  if (header == context.client_metadata().end()) return state.options.tokens->Check("");
  return state.options.tokens->Check(absl::string_view(header->second.data(), header->second.size()));
}

absl::StatusCode CancelCode(const grpc::CallbackServerContext& context) {
  return context.deadline() <= std::chrono::system_clock::now() ? absl::StatusCode::kDeadlineExceeded
                                                                : absl::StatusCode::kCancelled;
}

UnaryCallBase::UnaryCallBase(ServiceState* state, RpcMethod method, grpc::CallbackServerContext* context)
    : state_(state), context_(context), scope_(&state->admission, state->observer, method) {}

void UnaryCallBase::Start(const grpc::ByteBuffer* in, grpc::ByteBuffer* out, google::protobuf::Message* request) {
  out_ = out;
  absl::Status status = Admit(*state_, *context_, ServedWhileDraining());
  // Without a message the client was gone, or out of time, before it was complete. (The context may not know yet.)
  if (status.ok() && !in->Valid()) {
    status = absl::Status(CancelCode(*context_), "the call was given up before its message was complete");
  }
  if (status.ok()) status = scope_.Reserve(static_cast<int64_t>(in->Length()));
  // gRPC lends the bytes as const but keeps them until the call ends; freed here they are not held twice, or in vain.
  if (status.ok()) status = ParseMessage(const_cast<grpc::ByteBuffer*>(in), request);
  if (!status.ok()) {
    const_cast<grpc::ByteBuffer*>(in)->Clear();
    request->Clear();
    return Finish(status, *request);
  }
  Handle();
}

void UnaryCallBase::OnCancel() {
  cancel_->cancelled.store(true, std::memory_order_release);
  scope_.Handled(CancelCode(*context_));
}

void UnaryCallBase::Finish(const absl::Status& status, const google::protobuf::Message& response) {
  if (status.ok()) {
    *out_ = SerializeMessage(response);
  } else {
    const std::string reason = GetErrorDetails(status).reason;
    if (!reason.empty()) state_->observer->OnError(reason);
  }
  scope_.Handled(status.code());
  grpc::ServerUnaryReactor::Finish(ToGrpcStatus(status));  // may delete this
}

}  // namespace attnd

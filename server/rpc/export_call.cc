#include "server/rpc/export_call.h"

#include <string>
#include <utility>

#include "attnd/v1/attnd.pb.h"
#include "server/engine/errors.h"
#include "server/rpc/status_map.h"
#include "server/rpc/unary_call.h"
#include "server/rpc/validate.h"

namespace attnd {
namespace {

constexpr int64_t kPieceBytes = int64_t{1} << 20;

}  // namespace

ExportCall* ExportCall::Start(ServiceState* state, grpc::CallbackServerContext* context, const grpc::ByteBuffer* in) {
  auto call = std::make_shared<ExportCall>(state, context);
  {
    absl::MutexLock lock(&state->streams_mutex);
    state->streams.insert(call);
  }
  v1::ExportSessionRequest request;
  absl::Status status = call->LetIn(in);
  if (status.ok()) status = ParseMessage(const_cast<grpc::ByteBuffer*>(in), &request);
  if (status.ok()) status = CheckSessionId(request.session_id());
  if (!status.ok()) {
    const_cast<grpc::ByteBuffer*>(in)->Clear();
    call->Stop(status);
    call->Continue();
  } else {
    state->engine->ExportSession(
        request.session_id(), [call](absl::StatusOr<std::unique_ptr<SessionExport>> s) { call->Begin(std::move(s)); });
  }
  return call.get();  // gRPC calls OnDone, which lets go of it, only after this returned
}

ExportCall::ExportCall(ServiceState* state, grpc::CallbackServerContext* context) : state_(state), context_(context) {
  scope_.emplace(&state->admission, state->observer, RpcMethod::kExportSession);
}

absl::Status ExportCall::LetIn(const grpc::ByteBuffer* in) {
  absl::Status status = Admit(*state_, *context_, /*served_while_draining=*/false);
  if (status.ok() && !in->Valid()) {
    status = absl::Status(CancelCode(*context_), "the call was given up before its message was complete");
  }
  // For the request, and for the piece that is made or written at any time.
  if (status.ok()) status = scope_->Reserve(static_cast<int64_t>(in->Length()) + kPieceBytes);
  if (status.ok()) status = state_->admission.OpenStream();
  admitted_ = status.ok();
  return status;
}

void ExportCall::Begin(absl::StatusOr<std::unique_ptr<SessionExport>> source) {
  if (!source.ok()) {
    Stop(source.status());
  } else {
    absl::MutexLock lock(&mutex_);
    if (!stopped_) source_ = *std::move(source);
  }
  Continue();
}

void ExportCall::Continue() {
  const auto self = shared_from_this();  // gRPC may let go of it as soon as it has the status
  std::unique_ptr<SessionExport> source;
  {
    absl::MutexLock lock(&mutex_);
    source = std::move(source_);
  }
  grpc::ByteBuffer piece;
  if (source != nullptr) {
    absl::StatusOr<std::string> data = source->Next();
    if (!data.ok() || data->empty()) {
      Stop(data.status());
    } else {
      piece = MakePiece(*std::move(data), source->total_bytes());
    }
  }
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    if (!stopped_) {
      source_ = std::move(source);
      piece_ = std::move(piece);
      return StartWrite(&piece_);
    }
    status = end_status_;
  }
  source.reset();  // now: the engine may be gone soon after the call is
  if (!status.ok() && !context_->IsCancelled()) state_->observer->OnError(GetErrorDetails(status).reason);
  Finish(ToGrpcStatus(status));
}

grpc::ByteBuffer ExportCall::MakePiece(std::string data, int64_t total_bytes) {
  v1::ExportSessionResponse response;
  response.set_data(std::move(data));
  if (std::exchange(first_, false)) response.set_total_bytes(total_bytes);
  return SerializeMessage(response);
}

void ExportCall::OnWriteDone(bool ok) {
  piece_.Clear();
  if (!ok) Stop(absl::CancelledError("the client is gone"));
  Continue();
}

void ExportCall::Stop(const absl::Status& status) {
  std::unique_ptr<SessionExport> dropped;  // after the lock
  absl::MutexLock lock(&mutex_);
  if (stopped_) return;
  stopped_ = true;
  end_status_ = status;
  dropped = std::move(source_);
}

void ExportCall::CutOff() { Stop(Admission::DrainingError()); }

void ExportCall::OnCancel() {
  scope_->Handled(CancelCode(*context_));
  Stop(absl::CancelledError("the client is gone"));
}

void ExportCall::OnDone() {
  const auto self = shared_from_this();
  {
    absl::MutexLock lock(&state_->streams_mutex);
    state_->streams.erase(self);
  }
  absl::MutexLock lock(&mutex_);
  scope_->Handled(context_->IsCancelled() ? CancelCode(*context_) : end_status_.code());
  if (admitted_) state_->admission.CloseStream();
  scope_.reset();  // last: from here on the service may be gone
}

}  // namespace attnd

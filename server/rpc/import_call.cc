#include "server/rpc/import_call.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"
#include "server/rpc/convert.h"
#include "server/rpc/status_map.h"
#include "server/rpc/unary_call.h"
#include "server/rpc/validate.h"

namespace attnd {

ImportCall* ImportCall::Start(ServiceState* state, grpc::CallbackServerContext* context, grpc::ByteBuffer* out) {
  auto call = std::make_shared<ImportCall>(state, context, out);
  {
    absl::MutexLock lock(&state->streams_mutex);
    state->streams.insert(call);
  }
  // After the registration: a drain that begins in between is seen by one of the two.
  if (const absl::Status status = call->LetIn(); !status.ok()) {
    call->End(status);
  } else {
    absl::MutexLock lock(&call->mutex_);
    if (!call->ended_) call->StartRead(&call->incoming_);
  }
  return call.get();  // gRPC calls OnDone, which lets go of it, only after this returned
}

ImportCall::ImportCall(ServiceState* state, grpc::CallbackServerContext* context, grpc::ByteBuffer* out)
    : state_(state), context_(context), out_(out) {
  scope_.emplace(&state->admission, state->observer, RpcMethod::kImportSession);
}

absl::Status ImportCall::LetIn() {
  absl::Status status = Admit(*state_, *context_, /*served_while_draining=*/false);
  if (status.ok()) status = state_->admission.OpenStream();
  admitted_ = status.ok();
  return status;
}

void ImportCall::OnReadDone(bool ok) {
  const auto self = shared_from_this();
  std::unique_ptr<SessionImport> target;
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return;
    busy_ = true;
    target = std::move(target_);
  }
  if (ok) {
    const absl::Status status = TakeMessage(&target);
    return ReadOn(std::move(target), status);
  }
  // Half-closed, or cancelled: then the snapshot is most likely incomplete, and OnCancel knows what became of the call.
  if (target == nullptr) target = state_->engine->ImportSession(std::nullopt);
  target->Finish([self](absl::StatusOr<SessionInfo> info) { self->Answer(info); });
}

absl::Status ImportCall::TakeMessage(std::unique_ptr<SessionImport>* target) {
  const int64_t bytes = static_cast<int64_t>(incoming_.Length());
  // Before the message is parsed, which takes that much memory again.
  absl::Status status = state_->admission.Reserve(bytes);
  if (!status.ok()) {
    incoming_.Clear();
    return status;
  }
  {
    v1::ImportSessionRequest request;
    status = ParseMessage(&incoming_, &request);
    if (status.ok()) status = WriteMessage(request, target);
  }
  state_->admission.Release(bytes);
  return status;
}

absl::Status ImportCall::WriteMessage(const v1::ImportSessionRequest& request, std::unique_ptr<SessionImport>* target) {
  messages_++;
  std::optional<SessionConfig> expected;
  if (request.has_expected()) {
    if (messages_ > 1) {
      return InvalidArgument("BAD_CONFIG", absl::StrCat("message ", messages_, " has an expected configuration, which ",
                                                        "only the first one may have"));
    }
    absl::StatusOr<SessionConfig> config = MakeSessionConfig(request.expected());
    if (!config.ok()) return config.status();
    expected = *std::move(config);
  }
  if (*target == nullptr) *target = state_->engine->ImportSession(std::move(expected));
  return (*target)->Write(request.data());
}

void ImportCall::ReadOn(std::unique_ptr<SessionImport> target, const absl::Status& status) {
  if (!status.ok()) {
    target.reset();  // what it holds is free before the client has its answer
    End(status);     // which waits for what follows
  }
  std::unique_ptr<SessionImport> dropped;  // after the lock
  {
    absl::MutexLock lock(&mutex_);
    if (!ended_) {
      busy_ = false;
      target_ = std::move(target);
      return StartRead(&incoming_);
    }
    dropped = std::move(target);
  }
  dropped.reset();
  absl::MutexLock lock(&mutex_);
  busy_ = false;
  FinishNow();
}

void ImportCall::Answer(const absl::StatusOr<SessionInfo>& info) {
  if (info.ok()) {
    v1::Session session;
    ToProto(*info, &session);
    *out_ = SerializeMessage(session);
  }
  bool unwanted;
  {
    absl::MutexLock lock(&mutex_);
    unwanted = ended_ && info.ok();
    if (!ended_) {
      ended_ = true;
      end_status_ = info.status();
    }
  }
  // Nobody will learn its id.
  if (unwanted) (void)state_->engine->CloseSession(info->session_id);
  absl::MutexLock lock(&mutex_);
  busy_ = false;
  FinishNow();
}

void ImportCall::End(const absl::Status& status) {
  const auto self = shared_from_this();    // the end may let go of this before the lock is released
  std::unique_ptr<SessionImport> dropped;  // without the lock
  {
    absl::MutexLock lock(&mutex_);
    if (ended_) return;
    ended_ = true;
    end_status_ = status;
    if (busy_) return;  // whoever is at it ends the call
    dropped = std::move(target_);
  }
  dropped.reset();
  absl::MutexLock lock(&mutex_);
  FinishNow();
}

void ImportCall::FinishNow() {
  if (!end_status_.ok() && !context_->IsCancelled()) {
    state_->observer->OnError(GetErrorDetails(end_status_).reason);
  }
  Finish(ToGrpcStatus(end_status_));
}

void ImportCall::BeginDrain() { End(Admission::DrainingError()); }

void ImportCall::OnCancel() {
  scope_->Handled(CancelCode(*context_));
  End(absl::CancelledError("the client is gone"));
}

void ImportCall::OnDone() {
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

#include "server/rpc/call_scope.h"

#include "absl/time/time.h"

namespace attnd {

namespace {

bool IsStream(RpcMethod method) {
  return method == RpcMethod::kStepStream || method == RpcMethod::kExportSession || method == RpcMethod::kImportSession;
}

}  // namespace

CallScope::CallScope(Admission* admission, RpcObserver* observer, RpcMethod method)
    : admission_(admission), observer_(observer), method_(method), start_(std::chrono::steady_clock::now()) {
  admission_->CallBegins();
  if (IsStream(method_)) {
    observer_->OnStreamsActive(1);
  } else {
    observer_->OnRequestsInFlight(1);
  }
}

CallScope::~CallScope() {
  Handled(absl::StatusCode::kUnknown);  // not reached without an answer; a gauge must not be stuck if it ever is
  admission_->Release(bytes_);
  admission_->CallEnds();
}

absl::Status CallScope::Reserve(int64_t bytes) {
  absl::Status status = admission_->Extend(bytes_, bytes);
  if (status.ok()) bytes_ += bytes;
  return status;
}

void CallScope::Handled(absl::StatusCode code) {
  if (handled_.exchange(true, std::memory_order_acq_rel)) return;
  if (IsStream(method_)) {
    observer_->OnStreamsActive(-1);
  } else {
    observer_->OnRequestsInFlight(-1);
  }
  observer_->OnHandled(method_, code, absl::FromChrono(std::chrono::steady_clock::now() - start_));
}

}  // namespace attnd

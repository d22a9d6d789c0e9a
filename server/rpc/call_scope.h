// One RPC's accounting. It is counted as handled exactly once, by whichever comes first of its answer and its
// cancellation; only then is its request no longer in flight. Its bytes are given back and the drain is told when the
// scope is destroyed, which is when nothing reads the request's memory any more.
//
// Thread-safe: an answer and a cancellation may come at the same time.
#ifndef ATTND_SERVER_RPC_CALL_SCOPE_H_
#define ATTND_SERVER_RPC_CALL_SCOPE_H_

#include <atomic>
#include <chrono>
#include <cstdint>

#include "absl/status/status.h"
#include "server/rpc/admission.h"
#include "server/rpc/rpc_observer.h"

namespace attnd {

class CallScope {
 public:
  CallScope(Admission* admission, RpcObserver* observer, RpcMethod method);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

  // At first the request's bytes, then its answer's. Not thread-safe.
  absl::Status Reserve(int64_t bytes);
  void Handled(absl::StatusCode code);

 private:
  Admission* const admission_;
  RpcObserver* const observer_;
  const RpcMethod method_;
  const std::chrono::steady_clock::time_point start_;
  int64_t bytes_ = 0;
  std::atomic<bool> handled_{false};
};

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_CALL_SCOPE_H_

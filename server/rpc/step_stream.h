// The reactor of one StepStream: reads steps, keeps several in flight in the engine, writes answers as they finish.
//
// Bounds: at most kMaxInFlight steps are read and not yet answered, and no further one is read while their bytes and
// their answers' fill a message's worth; a client that does not read its answers therefore stops being read from.
//
// The stream ends with OK once the client has half-closed and its last answer is written; with UNAVAILABLE on a drain,
// once what is in flight is answered; with INVALID_ARGUMENT, likewise, after bytes that are no StepRequest. When the
// client is gone, its queued work is cancelled and the gauges are released at once, whatever writes are pending.
//
// Thread-safe: reactions, completions from the engine and the drain come from different threads.
// Lifetime: kept by ServiceState::streams until OnDone.
#ifndef ATTND_SERVER_RPC_STEP_STREAM_H_
#define ATTND_SERVER_RPC_STEP_STREAM_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <deque>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "attnd/v1/attnd.pb.h"
#include "server/rpc/call_scope.h"
#include "server/rpc/service_state.h"
#include "server/rpc/stream_call.h"

namespace attnd {

class StepStreamCall final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                             public StreamCall,
                             public std::enable_shared_from_this<StepStreamCall> {
 public:
  static constexpr int kMaxInFlight = 64;

  // Creates and starts a stream, which belongs to `state`.
  static StepStreamCall* Start(ServiceState* state, grpc::CallbackServerContext* context);

  StepStreamCall(ServiceState* state, grpc::CallbackServerContext* context);

  void BeginDrain() override;
  void CutOff() override {}  // what is in flight is the engine's to end

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  // A step from its reading to the end of its answer's writing.
  struct Step {
    v1::StepRequest request;
    v1::StepResponse response;
    grpc::ByteBuffer answer;
    int64_t bytes = 0;           // of the request, on the wire, and of the answer once it is let in
    int64_t reserved_bytes = 0;  // of admission
  };

  void HandleMessage();
  absl::Status Submit(Step* step);
  absl::Status ReserveAnswer(Step* step, int64_t bytes);
  void Answer(Step* step, const absl::Status& status);
  void End(const absl::Status& status);  // reads no more; ends once everything is answered
  void ForgetStep(std::unique_ptr<Step> step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Starts whatever can be started: a write, a read, the end. Operations are started with the lock held, because the
  // end of one thread must not overtake the read of another; gRPC runs no reaction inside them.
  void Advance() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ServiceState* const state_;
  grpc::CallbackServerContext* const context_;
  const std::shared_ptr<CancelToken> cancel_ = std::make_shared<CancelToken>();
  bool admitted_ = false;           // it holds one of the places for streams
  std::optional<CallScope> scope_;  // ends with OnDone: this object may outlive the service by a moment
  grpc::ByteBuffer incoming_;       // of the one read in progress

  absl::Mutex mutex_;
  std::deque<std::unique_ptr<Step>> answers_ ABSL_GUARDED_BY(mutex_);  // the first is being written if writing_
  int in_flight_ ABSL_GUARDED_BY(mutex_) = 0;                          // steps that exist, answers_ included
  int64_t in_flight_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ending_ ABSL_GUARDED_BY(mutex_) = false;  // nothing is read any more
  bool gone_ ABSL_GUARDED_BY(mutex_) = false;    // nobody will read an answer
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_STEP_STREAM_H_

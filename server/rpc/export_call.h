// The reactor of one ExportSession: asks the engine for a snapshot and writes it, one piece of at most 1 MiB at a time.
// The next piece is made when the one before it has left for the transport, so a client that reads slowly costs no
// memory but the session's own blocks, which stay until it has read them all or is gone.
//
// A drain waits for it; what is not through when the drain's time is up ends with UNAVAILABLE (DRAINING).
#ifndef ATTND_SERVER_RPC_EXPORT_CALL_H_
#define ATTND_SERVER_RPC_EXPORT_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/rpc/call_scope.h"
#include "server/rpc/service_state.h"
#include "server/rpc/stream_call.h"

namespace attnd {

class ExportCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                         public StreamCall,
                         public std::enable_shared_from_this<ExportCall> {
 public:
  // Creates and starts a call, which belongs to `state`.
  static ExportCall* Start(ServiceState* state, grpc::CallbackServerContext* context, const grpc::ByteBuffer* in);

  ExportCall(ServiceState* state, grpc::CallbackServerContext* context);

  void BeginDrain() override {}
  void CutOff() override;

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  // At any time one of three goes on: the engine is asked, a piece is made, a piece is written. Each ends here.
  void Continue();
  absl::Status LetIn(const grpc::ByteBuffer* in);
  void Begin(absl::StatusOr<std::unique_ptr<SessionExport>> source);
  // Nothing is sent any more; what goes on now notices. Frees the snapshot, unless a piece of it is being made.
  void Stop(const absl::Status& status);
  grpc::ByteBuffer MakePiece(std::string data, int64_t total_bytes);

  ServiceState* const state_;
  grpc::CallbackServerContext* const context_;
  bool admitted_ = false;           // it holds one of the places for streams
  std::optional<CallScope> scope_;  // ends with OnDone: this object may outlive the service by a moment
  grpc::ByteBuffer piece_;          // of the one write in progress
  bool first_ = true;               // of whoever goes on

  absl::Mutex mutex_;
  std::unique_ptr<SessionExport> source_ ABSL_GUARDED_BY(mutex_);  // null while a piece is made
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_EXPORT_CALL_H_

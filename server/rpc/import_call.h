// The reactor of one ImportSession: reads one message at a time and hands its bytes to the engine, which puts them
// where they belong; memory holds one message, whatever the session's size.
//
// An error ends the call at once, with its reason. All or nothing: what came is dropped when the client goes away
// before it has its answer, and so is a session that was complete a moment before. A drain ends it with UNAVAILABLE
// (DRAINING).
#ifndef ATTND_SERVER_RPC_IMPORT_CALL_H_
#define ATTND_SERVER_RPC_IMPORT_CALL_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "attnd/v1/attnd.pb.h"
#include "server/rpc/call_scope.h"
#include "server/rpc/service_state.h"
#include "server/rpc/stream_call.h"

namespace attnd {

class ImportCall final : public grpc::ServerReadReactor<grpc::ByteBuffer>,
                         public StreamCall,
                         public std::enable_shared_from_this<ImportCall> {
 public:
  // Creates and starts a call, which belongs to `state`.
  static ImportCall* Start(ServiceState* state, grpc::CallbackServerContext* context, grpc::ByteBuffer* out);

  ImportCall(ServiceState* state, grpc::CallbackServerContext* context, grpc::ByteBuffer* out);

  void BeginDrain() override;
  void CutOff() override { BeginDrain(); }

  void OnReadDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  absl::Status LetIn();
  // The message that was read, whose bytes are accounted for while they are in memory.
  absl::Status TakeMessage(std::unique_ptr<SessionImport>* target);
  absl::Status WriteMessage(const v1::ImportSessionRequest& request, std::unique_ptr<SessionImport>* target);
  // Reads on, or ends when there was an error or an end meanwhile.
  void ReadOn(std::unique_ptr<SessionImport> target, const absl::Status& status);
  void Answer(const absl::StatusOr<SessionInfo>& info);
  // Ends the call, as soon as what goes on with its session comes back.
  void End(const absl::Status& status);
  void FinishNow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ServiceState* const state_;
  grpc::CallbackServerContext* const context_;
  grpc::ByteBuffer* const out_;
  bool admitted_ = false;           // it holds one of the places for streams
  std::optional<CallScope> scope_;  // ends with OnDone: this object may outlive the service by a moment
  grpc::ByteBuffer incoming_;       // of the one read in progress
  int64_t messages_ = 0;            // of the one thread that has what was read

  absl::Mutex mutex_;
  // Null before the first message, and while a message is written to it.
  std::unique_ptr<SessionImport> target_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;  // a message is written, or the engine is asked to open the session
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status end_status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_IMPORT_CALL_H_

// What the edge tells as it happens, so that it knows no metrics library. Calls come from many threads at once and must
// be short.
#ifndef ATTND_SERVER_RPC_RPC_OBSERVER_H_
#define ATTND_SERVER_RPC_RPC_OBSERVER_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace attnd {

enum class RpcMethod {
  kAttend,
  kAttendBackward,
  kCreateSession,
  kStep,
  kStepStream,
  kRewindSession,
  kForkSession,
  kReorderSessions,
  kExportSession,
  kImportSession,
  kGetSession,
  kListSessions,
  kCloseSession,
  kGetServerInfo,
};
inline constexpr absl::string_view kRpcMethodNames[] = {
    "Attend",        "AttendBackward", "CreateSession",   "Step",          "StepStream",
    "RewindSession", "ForkSession",    "ReorderSessions", "ExportSession", "ImportSession",
    "GetSession",    "ListSessions",   "CloseSession",    "GetServerInfo"};

class RpcObserver {
 public:
  virtual ~RpcObserver() = default;
  // Every RPC that reached the service is handled exactly once, when it is answered or its client is gone.
  virtual void OnHandled(RpcMethod, absl::StatusCode, absl::Duration /*since its start*/) {}
  // An error that went to a client: of a unary call, of a step in a stream, of a segment.
  virtual void OnError(absl::string_view /*reason*/) {}
  // Requests (unary calls and steps of streams) that were received and not yet answered.
  virtual void OnRequestsInFlight(int /*delta*/) {}
  virtual void OnStreamsActive(int /*delta*/) {}
  // A connection that was closed at once because as many were open as may be.
  virtual void OnConnectionRefused() {}
};

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_RPC_OBSERVER_H_

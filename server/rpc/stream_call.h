// What the service knows of a call that lives longer than a message: it counts against --max_streams, and is told when
// the server drains. Kept by ServiceState::streams from its start to its OnDone.
#ifndef ATTND_SERVER_RPC_STREAM_CALL_H_
#define ATTND_SERVER_RPC_STREAM_CALL_H_

namespace attnd {

// Thread-safe.
class StreamCall {
 public:
  virtual ~StreamCall() = default;
  // Nothing new is let in from now on; what is on its way may be finished.
  virtual void BeginDrain() = 0;
  // The time for that is up: the call ends now, with UNAVAILABLE.
  virtual void CutOff() = 0;
};

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_STREAM_CALL_H_

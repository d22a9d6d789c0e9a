// Pipelined steps: several in flight on one stream, answers matched to their requests by id.
//
//   std::unique_ptr<StepStream> stream = client.OpenStepStream({.window = 8});
//   absl::StatusOr<uint64_t> id = stream->Send(*session.MakeStep(layer, q, k, v));
//   ...                                     // send more
//   absl::StatusOr<StepResult> result = stream->Wait(*id);
//   absl::Status status = stream->Finish();
//
// Steps of one session and layer run in the order sent. A step's own error comes as the status of its Wait and does
// not end the stream; what ends the stream (connection lost, server draining, a timeout) is the status of every
// step that is still unanswered. Nothing is ever sent twice.
#ifndef ATTND_CLIENT_CPP_STEP_STREAM_H_
#define ATTND_CLIENT_CPP_STEP_STREAM_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "requests.h"

namespace attnd::client {

namespace internal {
class Transport;
}

struct StepStreamOptions {
  int window = 8;  // steps in flight; Send waits for an answer beyond it
  // Longest wait for an answer, or for room in the window. Zero: the client's default_timeout. Past it the stream is
  // cancelled, because the fate of the steps in flight is unknown then: DEADLINE_EXCEEDED.
  absl::Duration step_timeout = absl::ZeroDuration();
};

// Thread-safe. The destructor cancels what is unanswered.
class StepStream {
 public:
  ~StepStream();
  StepStream(const StepStream&) = delete;
  StepStream& operator=(const StepStream&) = delete;

  // Copies the request's tensors and returns the id to wait for. Waits while the window is full.
  // RESOURCE_EXHAUSTED with MESSAGE_TOO_LARGE · FAILED_PRECONDITION after Finish · what ended the stream.
  absl::StatusOr<uint64_t> Send(const StepRequest& request);

  // The answer to one step; each id can be waited for once (NOT_FOUND otherwise). Errors as Client::Step.
  absl::StatusOr<StepResult> Wait(uint64_t request_id);

  // Send and Wait without waiting, whatever the window and the step_timeout: `done` is called exactly once, on a thread
  // of gRPC's, or on the one that ends the stream or finds it ended. It must not block, nor destroy the stream.
  // `sent`: when the step left for the connection; before that it waited here for those ahead of it. Zero: it never
  // did.
  using Done = std::function<void(absl::StatusOr<StepResult>, std::chrono::steady_clock::time_point sent)>;
  void SendAsync(const StepRequest& request, Done done);

  // False: it was finished, cancelled or broken; every further step is refused.
  bool open() const;

  // Says that no more steps follow and waits until the server has answered all and closed the stream. Unclaimed
  // answers can still be waited for.
  absl::Status Finish();

  // Ends the stream at once: CANCELLED for all that is unanswered.
  void Cancel();

 private:
  friend class Client;
  class Impl;
  explicit StepStream(std::unique_ptr<Impl> impl);

  const std::unique_ptr<Impl> impl_;
};

}  // namespace attnd::client

#endif  // ATTND_CLIENT_CPP_STEP_STREAM_H_

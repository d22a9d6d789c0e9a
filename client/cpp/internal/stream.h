// The reactor behind StepStream: writes one request at a time from a queue, reads answers as they come, and hands
// them to whoever waits. gRPC's callbacks only move data under the mutex; nothing blocks in them.
#ifndef ATTND_CLIENT_CPP_INTERNAL_STREAM_H_
#define ATTND_CLIENT_CPP_INTERNAL_STREAM_H_

#include <grpcpp/support/client_callback.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "attnd/v1/attnd.pb.h"
#include "client/cpp/internal/transport.h"
#include "client/cpp/step_stream.h"

namespace attnd::client {

// Thread-safe. Invariants:
// 1. in_flight_ holds the ids sent and unanswered, at most options_.window of them.
// 2. answers_ holds the ids answered and not yet claimed; an id is in one of the two or nowhere.
// 3. final_ is set once, by OnDone (or by a timeout or Cancel before it); then nothing is in flight.
// 4. The owner keeps the object until OnDone has run (WaitDone). It may not go from inside OnDone, with the last
//    reference to the channel: gRPC 1.51 joins its callback threads where a channel is destroyed, and one of them
//    would join itself.
class StepStream::Impl final : public grpc::ClientBidiReactor<v1::StepRequest, v1::StepResponse> {
 public:
  static std::unique_ptr<Impl> Open(std::shared_ptr<internal::Transport> transport, const StepStreamOptions& options);

  absl::StatusOr<uint64_t> Send(const StepRequest& request);
  absl::StatusOr<StepResult> Wait(uint64_t request_id);
  void SendAsync(const StepRequest& request, Done done);
  absl::Status Finish();
  bool open() const {
    absl::MutexLock lock(&mutex_);
    return !ended_ && !half_closed_;
  }
  void Cancel(const absl::Status& status);
  void WaitDone() { done_.WaitForNotification(); }

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  Impl(std::shared_ptr<internal::Transport> transport, const StepStreamOptions& options);
  // REQUIRES: nothing being written. Returns what is to be done once the mutex is released.
  enum class NextWrite : uint8_t { kNothing, kRequest, kHalfClose };
  NextWrite PrepareWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartNext(NextWrite next);
  // What SendAsync promised an answer to.
  struct Promise {
    Done done;
    std::chrono::steady_clock::time_point sent = {};
  };
  // Returns the promises that the end breaks, for BreakAll once the mutex is released.
  [[nodiscard]] std::vector<Promise> EndLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LostLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void BreakAll(std::vector<Promise> promises, const absl::Status& status);
  bool HasRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return ended_ || static_cast<int>(in_flight_.size()) < options_.window;
  }

  const std::shared_ptr<internal::Transport> transport_;
  const StepStreamOptions options_;
  grpc::ClientContext context_;
  v1::StepRequest writing_;   // owned by gRPC between StartWrite and OnWriteDone
  v1::StepResponse reading_;  // owned by gRPC between StartRead and OnReadDone

  mutable absl::Mutex mutex_;
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  std::deque<v1::StepRequest> queue_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> in_flight_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, absl::StatusOr<StepResult>> answers_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, Promise> promises_ ABSL_GUARDED_BY(mutex_);  // of some ids in in_flight_
  bool write_pending_ ABSL_GUARDED_BY(mutex_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mutex_) = false;  // no more Sends
  bool half_close_sent_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status final_ ABSL_GUARDED_BY(mutex_);

  absl::Notification done_;
};

}  // namespace attnd::client

#endif  // ATTND_CLIENT_CPP_INTERNAL_STREAM_H_

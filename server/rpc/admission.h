// Which requests are let in: none while the server drains, no more bytes of requests and answers at a time than the
// server has memory for, and no more streams than it was told. Also counts the calls that are alive, so that a drain
// knows when the last one is gone. Thread-safe; free of gRPC. Owned by the service, outlives every call.
#ifndef ATTND_SERVER_RPC_ADMISSION_H_
#define ATTND_SERVER_RPC_ADMISSION_H_

#include <atomic>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace attnd {

class Admission {
 public:
  Admission(int64_t max_bytes, int64_t max_streams) : max_bytes_(max_bytes), max_streams_(max_streams) {}

  // Reserves the bytes of a request, to be given back with Release. RESOURCE_EXHAUSTED (QUEUE_FULL) when those of the
  // others leave no room; a request alone is always let in, whatever its size.
  absl::Status Reserve(int64_t bytes);
  // The same for `more` bytes of a request that holds `held` already: its answer's.
  absl::Status Extend(int64_t held, int64_t more);
  void Release(int64_t bytes) { bytes_.fetch_sub(bytes, std::memory_order_relaxed); }

  // RESOURCE_EXHAUSTED (STREAM_LIMIT) when as many streams are open as may be; otherwise to be given back with
  // CloseStream, once nothing of the stream is left.
  absl::Status OpenStream();
  void CloseStream() { streams_.fetch_sub(1, std::memory_order_relaxed); }

  void BeginDrain() { draining_.store(true, std::memory_order_release); }
  bool draining() const { return draining_.load(std::memory_order_acquire); }
  static absl::Status DrainingError();

  void CallBegins();
  void CallEnds();
  // True once no call is alive; false when `deadline` came first. Meant for a drain: calls that begin meanwhile count.
  bool WaitForCalls(absl::Time deadline);

  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }
  int64_t max_bytes() const { return max_bytes_; }
  int64_t max_streams() const { return max_streams_; }

 private:
  const int64_t max_bytes_;
  const int64_t max_streams_;
  std::atomic<int64_t> bytes_{0};
  std::atomic<int64_t> streams_{0};
  std::atomic<bool> draining_{false};
  absl::Mutex mutex_;
  int64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_ADMISSION_H_

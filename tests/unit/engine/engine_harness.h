// A real engine for tests, with calls that wait for their answers.
#ifndef ATTND_TESTS_UNIT_ENGINE_ENGINE_HARNESS_H_
#define ATTND_TESTS_UNIT_ENGINE_ENGINE_HARNESS_H_

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/engine.h"
#include "server/engine/errors.h"

namespace attnd {

// ThreadSanitizer makes the kernels some fifty times slower: tests whose size is not the point take less of it.
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif
// Both sanitizers keep freed memory for a while: what a process holds says little there.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kHoldsFreedMemory = true;
#else
inline constexpr bool kHoldsFreedMemory = false;
#endif

// One layer, every dim and head count 1, scale 1: what the scenarios use.
SessionConfig TinyConfig();

// What one step asks, for one session or several; tensors are float.
struct StepArgs {
  int layer = 0;
  std::vector<StepSegment> segments;
  std::vector<float> q, k, v;
  bool return_lse = false;
  bool zero_empty_rows = false;
  absl::Time deadline = absl::InfiniteFuture();
  std::shared_ptr<CancelToken> cancel;
};

struct StepAnswer {
  absl::Status status;  // of the step, or else of its first failed segment
  std::vector<SegmentOutcome> segments;
  std::vector<float> out, lse;
  absl::Duration queue_time, compute_time;
  std::string reason() const { return GetErrorDetails(status).reason; }
  std::string metadata(const std::string& key) const { return GetErrorDetails(status).metadata[key]; }
};

class CountingObserver : public EngineObserver {
 public:
  void OnStepDone(Phase, int64_t tokens, absl::Duration, absl::Duration, absl::Duration) override {
    Count("step"), Count("tokens", tokens);
  }
  void OnBatch(int segments, int64_t, int64_t) override { Count("batch"), Count("batch_segments", segments); }
  void OnRejected(absl::string_view reason) override { Count("rejected " + std::string(reason)); }
  void OnCancelled(CancelStage stage) override {
    Count(stage == CancelStage::kQueued ? "cancelled queued" : "cancelled computing");
  }
  void OnSessionCreated(Origin origin) override {
    const char* const names[] = {"created", "forked", "imported", "restored"};
    Count(names[static_cast<int>(origin)]);
  }
  void OnEvicted(Eviction eviction) override { Count(eviction == Eviction::kDropped ? "dropped" : "spilled"); }
  void OnSnapshot(SnapshotOp op, int64_t, absl::Duration) override { Count(std::string("snapshot ") + OpName(op)); }
  void OnSnapshotFailed(SnapshotOp op) override { Count(std::string("failed ") + OpName(op)); }
  static const char* OpName(SnapshotOp op) {
    const char* const names[] = {"export", "import", "spill", "restore", "drain"};
    return names[static_cast<int>(op)];
  }
  void OnSessionClosed(absl::string_view reason) override { Count(std::string(reason)); }

  int64_t operator[](const std::string& what) {
    const std::lock_guard lock(mutex_);
    return counts_[what];
  }

 private:
  void Count(const std::string& what, int64_t n = 1) {
    const std::lock_guard lock(mutex_);
    counts_[what] += n;
  }
  std::mutex mutex_;
  std::map<std::string, int64_t> counts_;
};

class Harness {
 public:
  static EngineOptions DefaultOptions();
  explicit Harness(const EngineOptions& options = DefaultOptions());

  absl::StatusOr<SessionInfo> TryCreate(const SessionConfig& config);
  std::string Create(const SessionConfig& config = TinyConfig());
  std::future<StepAnswer> Start(StepArgs args);
  StepAnswer Step(StepArgs args) { return Start(std::move(args)).get(); }

  // Steps of one session with k = 0 and q = 0, where an answer is the mean of the visible v (the tiny shape).
  static StepArgs MeanArgs(const std::string& id, std::vector<float> v, std::optional<int64_t> start = {},
                           bool rewind = false);
  StepAnswer Mean(const std::string& id, std::vector<float> v, std::optional<int64_t> start = {}, bool rewind = false) {
    return Step(MeanArgs(id, std::move(v), start, rewind));
  }
  absl::StatusOr<SessionInfo> Rewind(const std::string& id, int64_t length);
  absl::StatusOr<SessionInfo> TryFork(const std::string& id, std::optional<int64_t> length = {});
  std::string Fork(const std::string& id, std::optional<int64_t> length = {});
  absl::StatusOr<std::vector<int64_t>> Reorder(std::vector<std::string> ids, std::vector<int> sources);
  int64_t Length(const std::string& id, int layer = 0);
  int64_t used_bytes() { return engine->stats().used_bytes; }

  CountingObserver observer;
  std::unique_ptr<Engine> engine;
};

// A compute hook that holds the compute thread until it is opened.
class Gate {
 public:
  std::function<absl::Status()> hook() {
    return [this] {
      std::unique_lock lock(mutex_);
      arrivals_++;
      changed_.notify_all();
      changed_.wait(lock, [this] { return open_; });
      return absl::OkStatus();
    };
  }
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Close() {
    const std::lock_guard lock(mutex_);
    open_ = false;
  }
  void AwaitArrival(int count = 1) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return arrivals_ >= count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int arrivals_ = 0;
};

std::vector<float> RandomFloats(uint64_t seed, size_t count);
bool SameBits(const std::vector<float>& a, const std::vector<float>& b);

}  // namespace attnd

#endif  // ATTND_TESTS_UNIT_ENGINE_ENGINE_HARNESS_H_

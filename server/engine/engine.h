// The engine: sessions, their queue, and the loop that computes them. Free of gRPC, protobuf and Prometheus.
//
// Threads. Every method may be called from any thread and none but Drain waits for compute: work is queued for the
// engine's one compute thread, which forms a batch of whatever is queued (continuous batching), computes it on a oneTBB
// arena of `compute_threads` threads and calls the completions from the compute thread (they must be short). Only a
// step of a few tokens that takes a fraction of a millisecond, brought to an idle engine, is computed by Submit itself.
#ifndef ATTND_SERVER_ENGINE_ENGINE_H_
#define ATTND_SERVER_ENGINE_ENGINE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/types.h"

namespace attnd {

// Why something was refused, beside the status: a reason word of the wire contract (BAD_POSITION, CACHE_FULL, EXPIRED,
// ...), numbers for the client, and a delay when waiting helps. Carried as payloads of absl::Status; see errors.h.

struct SessionConfig {
  int num_layers = 0;
  HeadCounts heads;
  KvShape shape;
  // softmax_scale, softcap and causal; window is per layer below.
  float softmax_scale = 0;
  float softcap = 0;  // 0: none
  bool causal = true;
  std::vector<float> alibi_slopes;            // empty or num_q_heads
  std::vector<float> sinks;                   // empty or num_q_heads
  std::vector<int64_t> layer_windows;         // [num_layers], 0: none
  int64_t max_tokens = 0;                     // 0: as the cache allows
  absl::Duration ttl = absl::ZeroDuration();  // zero: the engine's default; infinite: never
  int64_t reserve_tokens = 0;
};

struct SessionInfo {
  std::string session_id;
  SessionConfig config;
  std::vector<int64_t> layer_lengths;
  std::vector<int64_t> layer_first_tokens;  // oldest token still held, by layer
  int64_t used_bytes = 0;
  int64_t spilled_bytes = 0;  // of its file, while it is on disk
  int64_t reserved_bytes = 0;
  absl::Time create_time;
  absl::Duration idle_time;
  absl::Duration time_to_live;
  uint64_t sequence = 0;  // creation order; the page token of lists
};

// Set by the transport when the client went away; read at batch forming, between chunks and before commit.
struct CancelToken {
  std::atomic<bool> cancelled{false};
};

struct StepSegment {
  std::string session_id;
  int64_t num_tokens = 0;
  std::optional<int64_t> start_position;
  bool rewind = false;
  MaskView mask;  // bits [num_tokens, num_tokens] or null; first_key is filled in by the engine
};

struct SegmentOutcome {
  absl::Status status;
  int64_t start_position = 0;
  int64_t length = 0;
};

struct StepOutcome {
  absl::Status status;  // of the step as a whole (queue full, cancelled, deadline); OK: see the segments
  std::vector<SegmentOutcome> segments;
  absl::Duration queue_time;
  absl::Duration compute_time;
};

// Memory that `q`, `k`, `v`, the masks and `out` point to must live until `done` was called. `done` is called exactly
// once, perhaps before Submit returns.
struct StepTask {
  int layer = 0;
  std::vector<StepSegment> segments;
  // Tensors of all segments, ragged along the tokens. Null data: append only (q) or attend only (k and v).
  const std::byte* q = nullptr;
  const std::byte* k = nullptr;
  const std::byte* v = nullptr;
  // Bytes of each, checked by the engine against the sessions' heads and dims.
  size_t q_bytes = 0, k_bytes = 0, v_bytes = 0;
  DType q_dtype = DType::kF32, k_dtype = DType::kF32, v_dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  bool zero_empty_rows = false;
  // Called from the engine once the step's shapes are known to be right, before compute: returns where out
  // [tokens, num_q_heads, value_dim] (out_bytes) and, if lse_floats > 0, lse [tokens, num_q_heads] are to be written.
  bool return_lse = false;
  struct Buffers {
    std::byte* out = nullptr;
    float* lse = nullptr;
  };
  absl::AnyInvocable<Buffers(size_t out_bytes, size_t lse_floats)> allocate;
  // Called by Submit before the step is queued, with the bytes that `allocate` will be asked for; an error refuses the
  // step. Called with the engine's mutex held: must be short and must not call the engine. May be null.
  absl::AnyInvocable<absl::Status(int64_t answer_bytes)> reserve_answer;
  absl::Time deadline = absl::InfiniteFuture();
  std::shared_ptr<CancelToken> cancel;
  absl::AnyInvocable<void(StepOutcome)> done;
};

// What the stateless calls have in common: attention of the caller's Q over the caller's K and V. All shapes are
// already validated by the caller.
struct StatelessTask {
  HeadCounts heads;
  KvShape shape;
  SoftmaxOptions softmax;
  MaskView mask;
  int64_t num_queries = 0;
  int64_t num_keys = 0;
  int64_t first_position = 0;
  bool zero_empty_rows = false;
  const std::byte *q = nullptr, *k = nullptr, *v = nullptr;
  DType q_dtype = DType::kF32, k_dtype = DType::kF32, v_dtype = DType::kF32;
  absl::Time deadline = absl::InfiniteFuture();
  std::shared_ptr<CancelToken> cancel;
  absl::AnyInvocable<void(absl::Status, absl::Duration queue_time, absl::Duration compute_time)> done;
};

struct AttendTask : StatelessTask {
  DType out_dtype = DType::kF32;
  std::byte* out = nullptr;
  float* lse = nullptr;      // or null
  float* weights = nullptr;  // or null
};

// The gradients of sum(d_out * out): BackwardWork of kernels/backward.h. shape.dtype is F32.
struct BackwardTask : StatelessTask {
  const std::byte* d_out = nullptr;  // [num_queries, num_q_heads, value_dim]
  DType d_out_dtype = DType::kF32;
  float *d_q = nullptr, *d_k = nullptr, *d_v = nullptr;  // zeros
  float* d_sinks = nullptr;                              // [num_q_heads], with sinks
};

// What happened, told as it happens: the engine knows no metrics library. Calls come from any of the
// engine's threads or the caller's, some with the engine's mutex held: they must be short, thread-safe and must not
// call the engine.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  enum class Phase { kPrefill, kDecode };  // decode: one token per segment
  enum class CancelStage { kQueued, kComputing };
  virtual void OnStepDone(Phase, int64_t /*tokens*/, absl::Duration /*total*/, absl::Duration /*queue*/,
                          absl::Duration /*compute*/) {}
  virtual void OnBatch(int /*segments*/, int64_t /*tokens*/, int64_t /*kv_bytes_read*/) {}
  virtual void OnRejected(absl::string_view /*reason*/) {}
  virtual void OnCancelled(CancelStage) {}
  enum class Origin { kCreate, kFork, kImport, kRestore };  // restore: of a file of an earlier process
  virtual void OnSessionCreated(Origin) {}
  virtual void OnSessionClosed(absl::string_view /*reason: closed, expired, evicted, lost*/) {}
  // An idle session made room for others: its blocks are freed.
  enum class Eviction { kDropped, kSpilled };
  virtual void OnEvicted(Eviction) {}
  // A session went to or came from a snapshot, all of it. drain: into --snapshot_on_drain.
  enum class SnapshotOp { kExport, kImport, kSpill, kRestore, kDrain };
  virtual void OnSnapshot(SnapshotOp, int64_t /*bytes*/, absl::Duration) {}
  virtual void OnSnapshotFailed(SnapshotOp) {}
};

struct EngineOptions {
  int64_t kv_cache_bytes = 0;
  int compute_threads = 1;
  int64_t max_sessions = 10000;
  absl::Duration session_idle_ttl = absl::Minutes(10);
  int64_t max_queue_tokens = 65536;
  int64_t max_queue_requests = 4096;
  absl::Duration max_queue_delay = absl::InfiniteDuration();  // work that would wait longer is refused
  int64_t prefill_chunk_tokens = 256;                         // most prefill tokens computed in one batch
  // About as long the prefills of a batch take together (but at least a few tokens are computed).
  absl::Duration prefill_chunk_time = absl::InfiniteDuration();
  // When memory is short, sessions that have been idle longest make room: dropped, or moved to spill_dir if it is
  // named.
  bool evict_lru = false;
  std::string spill_dir;
  int64_t max_attend_bytes = 0;  // scratch for stateless calls; 0: an eighth of kv_cache_bytes
  // After a session could not be moved to disk, the next is not tried sooner: a full disk stays full for a while.
  absl::Duration spill_retry_delay = absl::Seconds(1);
  // Tests only.
  bool poison_cache = false;                   // fills new and freed blocks with NaN
  std::function<absl::Status()> compute_hook;  // on the compute thread, in each batch; an error fails its segments
  std::function<bool()> fail_allocation;       // BlockPool::Options; with the engine's mutex held
  std::function<int(const char*)> fail_io;     // SnapshotStore::Options
};

// Read without waiting for compute, e.g. at every scrape.
struct EngineStats {
  int64_t sessions_active = 0, sessions_limit = 0;
  int64_t queue_depth = 0, queue_limit = 0;  // requests
  int64_t queue_tokens = 0, queue_tokens_limit = 0;
  int64_t capacity_bytes = 0, reserved_bytes = 0, used_bytes = 0, shared_bytes = 0, spilled_bytes = 0;
  int64_t sessions_spilled = 0;  // of the active ones
  int64_t cache_tokens = 0;      // tokens of the longest layer, summed over sessions
  bool draining = false;
};

using SessionDone = absl::AnyInvocable<void(absl::StatusOr<SessionInfo>)>;

// What became of the sessions when they were saved, or when those of an earlier process were looked for.
struct SavedSessions {
  int64_t saved = 0;  // or found
  int64_t lost = 0;   // that could not be written, or whose files are damaged
  std::string first_error;
};

// A session's snapshot on its way out: of the moment when ExportSession came to it, whatever is done with the session
// since. Holds the session's blocks until it is destroyed. Not thread-safe; the engine must outlive it.
class SessionExport {
 public:
  virtual ~SessionExport() = default;
  virtual int64_t total_bytes() const = 0;
  // The next piece, at most 1 MiB; "" at the end. Copies and hashes one piece, and waits for nothing.
  virtual absl::StatusOr<std::string> Next() = 0;
};

using ExportDone = absl::AnyInvocable<void(absl::StatusOr<std::unique_ptr<SessionExport>>)>;

// A snapshot on its way in. Takes its memory, and its place among the sessions, when the header is complete; gives
// both back when it is destroyed before Finish. Not thread-safe; the engine must outlive it.
class SessionImport {
 public:
  virtual ~SessionImport() = default;
  // Bytes cut anywhere, of which memory holds a block. Copies and hashes them, and waits for nothing. An error is
  // final: INVALID_ARGUMENT (BAD_SNAPSHOT with what is wrong and where, BAD_CONFIG), RESOURCE_EXHAUSTED (SESSION_LIMIT,
  // CACHE_FULL, TOO_MANY_TOKENS), UNAVAILABLE (DRAINING).
  virtual absl::Status Write(absl::string_view bytes) = 0;
  // All has come: the session exists when `done` is called with it, and not before. Kernels of a new shape are
  // generated first, as in CreateSession. Once at most.
  virtual void Finish(SessionDone done) = 0;
};

struct CapacityEstimate {
  int64_t bytes_per_token = 0;
  int64_t tokens_capacity = 0;
  int64_t tokens_available = 0;
};

class Engine {
 public:
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options, EngineObserver* observer);
  virtual ~Engine();  // drains nothing: queued work is completed with UNAVAILABLE

  // The kernels of a new shape are generated first, so the answer can take milliseconds and comes by completion.
  virtual void CreateSession(SessionConfig config, SessionDone done) = 0;
  virtual void Submit(StepTask task) = 0;
  virtual void SubmitAttend(AttendTask task) = 0;
  virtual void SubmitBackward(BackwardTask task) = 0;
  // These come behind the queued steps of the sessions that they name. After an error every session is as it was.
  //
  // INVALID_ARGUMENT (BAD_POSITION), FAILED_PRECONDITION (TOKENS_FREED).
  virtual void RewindSession(std::string session_id, int64_t length, SessionDone done) = 0;
  // A new session with the first `length` tokens of each layer (none: all), of the same configuration but for
  // reserve_tokens, which are 0. As RewindSession, and RESOURCE_EXHAUSTED (SESSION_LIMIT).
  virtual void ForkSession(std::string session_id, std::optional<int64_t> length, SessionDone done) = 0;
  // Session i takes the tokens that session sources[i] has; answers the length of each one's longest layer. All or
  // nothing. The configurations may differ in max_tokens, ttl and reserve_tokens alone. What a session reserved and
  // does not hold stays reserved, but for what others keep of the blocks that it gives up.
  // INVALID_ARGUMENT (BAD_SHAPE, DUPLICATE_SESSION, BAD_CONFIG), FAILED_PRECONDITION (TOO_LONG).
  virtual void ReorderSessions(std::vector<std::string> session_ids, std::vector<int> sources,
                               absl::AnyInvocable<void(absl::StatusOr<std::vector<int64_t>>)> done) = 0;
  // Comes behind its queued steps, perhaps before it returns.
  virtual void ExportSession(std::string session_id, ExportDone done) = 0;
  // expected: num_layers, heads, dims and KV dtype that the session must have.
  virtual std::unique_ptr<SessionImport> ImportSession(std::optional<SessionConfig> expected) = 0;
  virtual absl::StatusOr<SessionInfo> GetSession(absl::string_view session_id) = 0;
  // Up to `limit` sessions with sequence > after.
  virtual std::vector<SessionInfo> ListSessions(uint64_t after, int limit) = 0;
  virtual absl::StatusOr<bool> CloseSession(absl::string_view session_id) = 0;  // was it open

  virtual CapacityEstimate Estimate(const SessionConfig& config) = 0;
  virtual EngineStats stats() const = 0;
  virtual const EngineOptions& options() const = 0;

  // Serves the sessions that an earlier process saved in `directory` (or moved there while memory was short), under
  // their ids: each is read when its first step comes, and its file is removed then. The directory stays locked until
  // the engine ends. A status: the directory cannot be used. Call before serving.
  virtual absl::StatusOr<SavedSessions> RestoreSessions(const std::string& directory) = 0;
  // Whether SaveSessions can use `directory`: makes it if it is not there and locks it until the engine ends.
  virtual absl::Status PrepareToSave(const std::string& directory) = 0;
  // Writes every session to `directory`, for RestoreSessions of a later process; what it writes is on the disk when it
  // returns. Asks `stop` before each session and each piece of it. Call after Drain: from then on
  // nothing comes back from disk any more.
  virtual absl::StatusOr<SavedSessions> SaveSessions(const std::string& directory, absl::FunctionRef<bool()> stop) = 0;

  // From now on new work is refused with UNAVAILABLE; what is queued or running is finished. Returns true once
  // nothing is left, false when `deadline` came first (what is left is then completed with UNAVAILABLE).
  virtual bool Drain(absl::Time deadline) = 0;
};

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_ENGINE_H_

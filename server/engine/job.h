// Work on its way through the engine: what was submitted, and the state that its computation needs.
#ifndef ATTND_SERVER_ENGINE_JOB_H_
#define ATTND_SERVER_ENGINE_JOB_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/attention.h"
#include "kernels/backward.h"
#include "kernels/block_layout.h"
#include "kernels/types.h"
#include "server/cache/session_cache.h"
#include "server/engine/engine.h"
#include "server/engine/session.h"

namespace attnd {

// Rows of one caller's tensor, dense: [rows, heads, dim].
struct TensorView {
  const std::byte* data = nullptr;  // null: absent
  DType dtype = DType::kF32;
  int heads = 0, dim = 0;
  size_t row_bytes() const { return size_t(heads) * dim * DTypeBytes(dtype); }
  const std::byte* row(int64_t i) const { return data + i * row_bytes(); }
};

// What a backward call needs beside its run.
struct BackwardRun {
  BackwardWork work;
  TensorView d_out;
  float* d_sinks = nullptr;
  int64_t tiles_done = 0;  // BackwardTiles
};

// What one sequence contributes to a job: a segment of a step, or a whole stateless call. The compute thread owns it
// from the job's start to its end.
struct SegmentRun {
  absl::Status status;               // the first failure; nothing of a failed run is computed or committed
  std::shared_ptr<Session> session;  // null: stateless, the blocks are `scratch`
  int64_t first_token = 0;           // of the job's tokens, which chunks count
  int64_t num_tokens = 0;            // query rows, or rows to append where there are no queries
  bool in_lane = false;              // it is one of the session's pending jobs
  bool entered = false;              // and has started: the session is `running` for it

  const BlockLayout* layout = nullptr;
  HeadCounts heads;
  SoftmaxOptions softmax;
  MaskView mask;
  bool zero_empty_rows = false;
  TensorView q, k, v;  // q of [num_tokens]; k and v of [kv_rows]
  int64_t kv_rows = 0;
  std::byte* out = nullptr;
  DType out_dtype = DType::kF32;
  float* lse = nullptr;
  float* weights = nullptr;
  BackwardRun* backward = nullptr;  // or null: attention. With it nothing is written to blocks, and nothing is attended

  // Set at the start, under the engine's mutex.
  int64_t first_position = 0;  // of query row 0
  int64_t kv_start = 0;        // position of row 0 of k and v
  int64_t num_keys = 0;        // once all rows are written
  StagedAppend staged;
  std::byte* scratch = nullptr;  // [blocks, num_kv_heads] blocks

  int64_t written_rows = 0;  // of k and v

  // Rows of k and v that must be in the blocks before query rows up to `end` are computed. A causal step writes as it
  // goes; elsewhere every query may see every key.
  int64_t RowsToWrite(int64_t end) const {
    if (kv_rows == 0) return 0;
    return session != nullptr && softmax.causal ? end : kv_rows;
  }
  // Null: freed, since the layer's window has passed it.
  std::byte* Block(int64_t index, int head) const {
    if (session == nullptr) return scratch + (index * heads.num_kv_heads + head) * layout->block_bytes;
    const BlockId id = session->cache.block(staged, index, head);
    return id == kNoBlock ? nullptr : session->cache.Address(id);
  }
  // The run's queries [begin, end), with every key that they may see. `blocks` as AttentionWork::blocks.
  AttentionWork Work(int64_t begin, int64_t end, const std::byte* const* blocks) const;
  size_t out_row_bytes() const { return size_t(heads.num_q_heads) * layout->shape.value_dim * DTypeBytes(out_dtype); }
};

// Rows [begin, end) of a run. Chunks of a run come in order, and a run is in a batch once at most.
struct ChunkWork {
  SegmentRun* run = nullptr;
  int64_t begin = 0, end = 0;
};

struct FreeDeleter {
  void operator()(std::byte* p) const { std::free(p); }
};

struct Job {
  // A move takes no time and no tokens: bookkeeping between the steps of its sessions, such as a fork.
  enum class Kind { kStep, kAttend, kBackward, kMove };

  uint64_t id = 0;
  Kind kind = Kind::kStep;
  int64_t tokens = 0;
  bool prefill = false;
  absl::Time deadline = absl::InfiniteFuture();
  std::shared_ptr<CancelToken> cancel;
  std::vector<SegmentRun> runs;  // of a move: one a session

  StepTask step;
  AttendTask attend;
  BackwardTask backward;
  BackwardRun backward_run;
  std::optional<BlockLayout> stateless_layout;
  std::unique_ptr<std::byte, FreeDeleter> scratch;  // of a stateless call: blocks, or for UseMemory
  // Called with the engine's mutex held, when no earlier job of the sessions is left.
  absl::AnyInvocable<absl::Status(absl::Span<const std::shared_ptr<Session>>)> move;
  absl::AnyInvocable<void(absl::Status)> move_done;
  absl::Status move_status;

  bool started = false;
  int awaited = 0;        // sessions that are on their way back from disk, and room: it is on hold until there are none
  bool in_batch = false;  // being computed now, without the mutex
  absl::Time arrival;
  absl::Time first_compute;
  absl::Duration compute_time;

  bool cancelled() const { return cancel != nullptr && cancel->cancelled.load(std::memory_order_relaxed); }
  bool AllFailed() const {
    for (const SegmentRun& run : runs) {
      if (run.status.ok()) return false;
    }
    return true;
  }
};

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_JOB_H_

// Computes a batch: checks the callers' numbers, writes their keys and values into blocks, attends or computes
// gradients. Knows nothing of queues, the mutex or who waits for the answer: failures are left in the runs' statuses.
//
// One thread at a time may call Run.
#ifndef ATTND_SERVER_ENGINE_BATCH_RUNNER_H_
#define ATTND_SERVER_ENGINE_BATCH_RUNNER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/attention.h"
#include "kernels/backward.h"
#include "server/engine/gradient_check.h"
#include "server/engine/input_check.h"
#include "server/engine/job.h"
#include "server/engine/worker_pool.h"

namespace attnd {

// Of `num_keys` keys, those that causality and the window leave for `num_queries` rows from `first_position` on
// together.
int64_t VisibleKeys(const SoftmaxOptions& softmax, int64_t first_position, int64_t num_queries, int64_t num_keys);

// Roughly how long one thread attends, in microseconds: `num_queries` rows per head over `num_keys` keys.
double EstimateAttendUs(const KvShape& shape, const HeadCounts& heads, int64_t num_queries, int64_t num_keys);

// The part of it that a query row of every head takes for each key, where many rows share the reading of K and V.
double EstimateUsPerKey(const KvShape& shape, const HeadCounts& heads);
// Of the run's call.
double EstimateUsPerKey(const SegmentRun& run);

class BatchRunner {
 public:
  BatchRunner(int threads, std::function<absl::Status()> hook);

  void Run(absl::Span<const ChunkWork> chunks);
  // Of the last Run.
  int64_t kv_bytes_read() const { return batch_.kv_bytes_read(); }
  double estimated_us() const { return estimated_us_; }

 private:
  // Rows [begin, end) of k and v that go into one block.
  struct WriteUnit {
    SegmentRun* run;
    int64_t begin, end;
    int head;
  };
  // A chunk of a run that wants the weights of all its rows: theirs lie apart in the caller's tensor.
  struct WeightsPiece {
    const ChunkWork* chunk;
    std::vector<float> weights;
  };

  void WriteRows(absl::Span<const ChunkWork> chunks);
  void Attend(absl::Span<const ChunkWork> chunks);
  void Differentiate(absl::Span<const ChunkWork> chunks);
  void ForEach(int64_t tasks, double estimated_us, absl::FunctionRef<void(int64_t task, int thread)> f);

  WorkerPool pool_;
  AttentionBatch batch_;
  BackwardBatch backward_batch_;
  InputCheck checks_;
  GradientCheck gradient_check_;
  const std::function<absl::Status()> hook_;
  // Kept from batch to batch for their memory.
  std::vector<WriteUnit> writes_;
  std::vector<const std::byte*> blocks_;
  std::vector<const ChunkWork*> works_;  // by work index
  std::vector<WeightsPiece> pieces_;
  double estimated_us_ = 0;
};

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_BATCH_RUNNER_H_

// How much prefill a batch may hold so that it takes about a given time, told from how fast recent batches went. Pure:
// no clock, no mutex.
//
// Work is counted in the microseconds that one thread is roughly estimated to need for it (batch_runner.h); how many of
// these are done in a microsecond of the clock, by all threads together, is what is learned here.
#ifndef ATTND_SERVER_ENGINE_CHUNK_BUDGET_H_
#define ATTND_SERVER_ENGINE_CHUNK_BUDGET_H_

#include "absl/time/time.h"

namespace attnd {

class ChunkBudget {
 public:
  // `target`: infinite, batches may take as long as they like.
  ChunkBudget(absl::Duration target, int threads);

  void AddBatch(double estimated_us, absl::Duration elapsed);

  // Estimated microseconds that a batch may hold.
  double us() const;

 private:
  const absl::Duration target_;
  // Sums over batches, in which each counts a tenth less with every one that follows.
  double estimated_us_, elapsed_us_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_CHUNK_BUDGET_H_

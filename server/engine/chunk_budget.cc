#include "server/engine/chunk_budget.h"

namespace attnd {
namespace {

constexpr double kKept = 0.9;
// Below this a batch's time is that of its surroundings: waking threads, answers, locks.
constexpr double kLeastEstimatedUs = 200;

}  // namespace

// Begins as if one batch of that size had gone exactly as estimated.
ChunkBudget::ChunkBudget(absl::Duration target, int threads)
    : target_(target), estimated_us_(kLeastEstimatedUs), elapsed_us_(kLeastEstimatedUs / threads) {}

void ChunkBudget::AddBatch(double estimated_us, absl::Duration elapsed) {
  if (estimated_us < kLeastEstimatedUs || elapsed <= absl::ZeroDuration()) return;
  estimated_us_ = kKept * estimated_us_ + estimated_us;
  elapsed_us_ = kKept * elapsed_us_ + absl::ToDoubleMicroseconds(elapsed);
}

double ChunkBudget::us() const { return absl::ToDoubleMicroseconds(target_) * estimated_us_ / elapsed_us_; }

}  // namespace attnd

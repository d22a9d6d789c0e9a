#include "server/engine/delay_estimate.h"

#include <algorithm>

namespace attnd {
namespace {

constexpr double kKept = 0.9;

}  // namespace

void DelayEstimate::Sums::Add(double amount, double elapsed_s) {
  batches = kKept * batches + 1;
  work = kKept * work + amount;
  seconds = kKept * seconds + elapsed_s;
}

void DelayEstimate::Sums::Wait(double elapsed_s) {
  if (batches > 0) seconds += elapsed_s;
}

void DelayEstimate::AddBatch(int64_t prefill_tokens, int64_t decodes, bool others_waited, absl::Duration elapsed) {
  const double seconds = absl::ToDoubleSeconds(elapsed);
  if (prefill_tokens > 0) {
    prefill_.Add(static_cast<double>(prefill_tokens), seconds);
  } else if (others_waited) {
    prefill_.Wait(seconds);
  }
  if (decodes > 0) {
    decode_.Add(static_cast<double>(decodes), seconds);
  } else if (others_waited) {
    decode_.Wait(seconds);
  }
}

absl::Duration DelayEstimate::OfPrefill(int64_t tokens_ahead) const {
  if (prefill_.work <= 0) return absl::ZeroDuration();
  return absl::Seconds(static_cast<double>(tokens_ahead) * prefill_.seconds / prefill_.work);
}

absl::Duration DelayEstimate::OfDecode(int64_t decodes_ahead) const {
  if (decodes_ahead == 0 || decode_.batches <= 0) return absl::ZeroDuration();
  const double batch_decodes = decode_.work / decode_.batches, batch_seconds = decode_.seconds / decode_.batches;
  return absl::Seconds(batch_seconds * std::max(1.0, static_cast<double>(decodes_ahead) / batch_decodes));
}

}  // namespace attnd

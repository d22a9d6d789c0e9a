// What the queue takes in: so many requests and tokens, nothing that would wait too long, nothing while draining.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"
#include "server/engine/step_plan.h"

namespace attnd {
namespace {

// Bytes of the step's out and LSE. All segments that were found have the same heads and dims.
int64_t AnswerBytes(const StepTask& step, int64_t tokens, const std::vector<SegmentRun>& runs) {
  if (step.q_bytes == 0) return 0;
  for (const SegmentRun& run : runs) {
    if (run.layout == nullptr) continue;
    const int64_t lse_bytes = step.return_lse ? run.heads.num_q_heads * static_cast<int64_t>(sizeof(float)) : 0;
    return tokens * (static_cast<int64_t>(run.out_row_bytes()) + lse_bytes);
  }
  return 0;
}

}  // namespace

absl::Duration EngineImpl::QueueRetryDelay() const {
  const absl::Duration backlog =
      std::max(delay_.OfPrefill(scheduler_.prefill_tokens_left()), delay_.OfDecode(scheduler_.ready_decodes()));
  if (backlog == absl::ZeroDuration()) return absl::Milliseconds(100);
  return std::clamp(backlog, absl::Milliseconds(10), absl::Seconds(10));
}

// What would wait longer than anyone is meant to is refused while it costs nothing.
absl::Status EngineImpl::CheckDelay(bool prefill) {
  const absl::Duration delay =
      prefill ? delay_.OfPrefill(scheduler_.prefill_tokens_left()) : delay_.OfDecode(scheduler_.ready_decodes());
  if (delay <= options_.max_queue_delay) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                   absl::StrCat("the request would wait about ", absl::FormatDuration(delay), ", the limit is ",
                                absl::FormatDuration(options_.max_queue_delay), " (--max_queue_delay)"),
                   {{"expected_delay_ms", absl::StrCat(absl::ToInt64Milliseconds(delay))}}, QueueRetryDelay());
}

absl::Status EngineImpl::LetStepIn(Job* job) {
  absl::Status status = CheckAccepting(job->tokens);
  if (!status.ok() || job->AllFailed()) return status;
  if (status = CheckDelay(job->prefill); !status.ok()) return status;
  if (job->step.reserve_answer == nullptr) return absl::OkStatus();
  return job->step.reserve_answer(AnswerBytes(job->step, job->tokens, job->runs));
}

absl::Status EngineImpl::CheckAccepting(int64_t tokens) {
  if (draining_) {
    return MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the server is shutting down");
  }
  if (scheduler_.HasRoom(tokens)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                   absl::StrCat("the queue holds ", scheduler_.queued_items(), " requests of ",
                                scheduler_.queued_tokens(), " tokens; its limits are ", options_.max_queue_requests,
                                " and ", options_.max_queue_tokens, ", the request has ", tokens),
                   {{"queued_requests", absl::StrCat(scheduler_.queued_items())},
                    {"queued_tokens", absl::StrCat(scheduler_.queued_tokens())}},
                   QueueRetryDelay());
}

}  // namespace attnd

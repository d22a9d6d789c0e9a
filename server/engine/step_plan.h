// What a step's request means for each of its sessions: is it well formed, where do its tokens go, does it fit.
#ifndef ATTND_SERVER_ENGINE_STEP_PLAN_H_
#define ATTND_SERVER_ENGINE_STEP_PLAN_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/engine/engine.h"
#include "server/engine/job.h"

namespace attnd {

// Checks that do not depend on the sessions: segments, presence of tensors. An error is the whole step's.
absl::Status ValidateStepForm(const StepTask& step);

// Checks the tensors' bytes against the sessions' heads and dims and fills in each run's view of them. `runs` has a
// run per segment with `session` set, or `status` where there is none. A segment of its own fault gets a status; an
// error that is returned is the whole step's. REQUIRES: ValidateStepForm.
absl::Status ValidateStepShapes(const StepTask& step, int64_t capacity_bytes, absl::Span<SegmentRun> runs);

// When the step starts: decides where the segment's tokens go and takes the memory for them.
// FAILED_PRECONDITION (BAD_POSITION, with the layer's length; TOKENS_FREED), RESOURCE_EXHAUSTED (TOO_MANY_TOKENS,
// CACHE_FULL). REQUIRES: the engine's mutex is held.
absl::Status StageSegment(int layer, const StepSegment& segment, const BlockPool& pool, SegmentRun* run);

// BAD_CONFIG, or OK.
absl::Status ValidateConfig(const SessionConfig& config);

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_STEP_PLAN_H_

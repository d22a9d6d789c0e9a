// What a layer's window means for its blocks: those that no coming row can see are freed, and positions that would see
// them can no longer be gone back to.
#ifndef ATTND_SERVER_ENGINE_WINDOW_H_
#define ATTND_SERVER_ENGINE_WINDOW_H_

#include <cstdint>

#include "absl/status/status.h"
#include "server/engine/engine.h"
#include "server/engine/job.h"
#include "server/engine/session.h"

namespace attnd {

// In tokens, 0: none.
int64_t WindowOf(const SessionConfig& config, int layer);

// FAILED_PRECONDITION (TOKENS_FREED, with the oldest token that the layer holds) when a row at `position` would see
// tokens that were freed.
absl::Status CheckHeld(const Session& session, int layer, int64_t position);

// Commits the run's tokens and frees the blocks that the layer's window has passed for good. What the run's own first
// row sees stays, so that the step can be replayed. REQUIRES: the run is staged.
void CommitAndFree(SegmentRun* run);

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_WINDOW_H_

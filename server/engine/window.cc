#include "server/engine/window.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace attnd {
namespace {

// The oldest token that a row at `position` may see.
int64_t FirstVisible(int64_t window, int64_t position) {
  return window == 0 ? 0 : std::max<int64_t>(0, position - window + 1);
}

}  // namespace

int64_t WindowOf(const SessionConfig& config, int layer) {
  return config.layer_windows.empty() ? 0 : config.layer_windows[layer];
}

absl::Status CheckHeld(const Session& session, int layer, int64_t position) {
  const int64_t window = WindowOf(session.model->config, layer);
  const int64_t needed = FirstVisible(window, position), held = session.cache.first_token(layer);
  if (needed >= held) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, "TOKENS_FREED",
                   absl::StrCat("a row at position ", position, " of layer ", layer, " would see tokens from ", needed,
                                " on, but those before ", held, " were freed when the layer's window of ", window,
                                " tokens had passed them"),
                   {{"first_token", absl::StrCat(held)}});
}

void CommitAndFree(SegmentRun* run) {
  SessionCache& cache = run->session->cache;
  const int layer = run->staged.layer;
  const int64_t start = run->staged.start;
  cache.Commit(&run->staged);
  cache.FreeBefore(layer, FirstVisible(WindowOf(run->session->model->config, layer), start));
}

}  // namespace attnd

#include "client/attnload/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "absl/strings/str_format.h"

namespace attnd::attnload {
namespace {

constexpr int64_t kLinesApart = 5;  // seconds, where there is no terminal

std::string Line(const Load& load) {
  const Nanos elapsed = Clock::now() - load.start();
  // The second that is over; the one before the last answers are still missing from.
  const Recorder::Glance glance = load.recorder().At(static_cast<int64_t>(ToSeconds(elapsed)) - 1);
  std::string line =
      absl::StrFormat("%5.0f/%.0f s  %5d steps/s %6d tokens/s  p50 %.2f ms  p99 %.2f ms  %d sessions",
                      ToSeconds(elapsed), ToSeconds(load.end() - load.start()), glance.steps, glance.tokens,
                      ToSeconds(glance.p50) * 1e3, ToSeconds(glance.p99) * 1e3, load.active());
  if (load.waiting() > 0) line += absl::StrFormat(" (+%d wait)", load.waiting());
  if (glance.rejected > 0) line += absl::StrFormat("  %d rejected", glance.rejected);
  if (glance.failed > 0) line += absl::StrFormat("  %d failed", glance.failed);
  if (glance.wrong > 0) line += absl::StrFormat("  %d WRONG", glance.wrong);
  return line;
}

}  // namespace

Progress::Progress(bool quiet) : quiet_(quiet), terminal_(isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() {
  if (terminal_ && !quiet_) std::fputs("\r\033[K", stderr);
}

void Progress::Show(const Load& load) {
  if (quiet_) return;
  ++shown_;
  if (terminal_) {
    std::fprintf(stderr, "\r\033[K%s", Line(load).c_str());
  } else if (shown_ % kLinesApart == 0) {
    std::fprintf(stderr, "%s\n", Line(load).c_str());
  }
}

}  // namespace attnd::attnload

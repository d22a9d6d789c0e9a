#include "client/attnctl/progress_bar.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/time/clock.h"

namespace attnd::attnctl {

ProgressBar::ProgressBar(int64_t total)
    : terminal_(isatty(STDERR_FILENO) == 1), total_(std::max<int64_t>(total, 1)), start_(absl::Now()) {}

ProgressBar::~ProgressBar() {
  if (terminal_) std::fputs("\r\033[K", stderr);
}

void ProgressBar::SetLabel(const std::string& label) {
  std::lock_guard<std::mutex> lock(mutex_);
  label_ = label;
  drawn_ = absl::InfinitePast();
  Draw();
}

void ProgressBar::Advance(int64_t amount) {
  std::lock_guard<std::mutex> lock(mutex_);
  done_ = std::min(done_ + amount, total_);
  Draw();
}

void ProgressBar::Draw() {
  const absl::Time now = absl::Now();
  // Ten a second: drawing must not slow down what it shows.
  if (!terminal_ || now - drawn_ < absl::Milliseconds(100)) return;
  drawn_ = now;
  constexpr int kWidth = 30;
  const int filled = static_cast<int>(done_ * kWidth / total_);
  const std::string bar = std::string(filled, '#') + std::string(kWidth - filled, '.');
  std::fprintf(stderr, "\r\033[K[%s] %3d%%  %4.1f s  %s", bar.c_str(), static_cast<int>(done_ * 100 / total_),
               absl::ToDoubleSeconds(now - start_), label_.c_str());
}

}  // namespace attnd::attnctl

// One line on a terminal that says how far a long command is. Prints nothing where standard error is no terminal.
#ifndef ATTND_CLIENT_ATTNCTL_PROGRESS_BAR_H_
#define ATTND_CLIENT_ATTNCTL_PROGRESS_BAR_H_

#include <cstdint>
#include <mutex>
#include <string>

#include "absl/time/time.h"

namespace attnd::attnctl {

// Thread-safe. The destructor wipes the line.
class ProgressBar {
 public:
  explicit ProgressBar(int64_t total);
  ~ProgressBar();

  void SetLabel(const std::string& label);
  void Advance(int64_t amount);

 private:
  void Draw();

  const bool terminal_;
  const int64_t total_;
  std::mutex mutex_;
  std::string label_;
  int64_t done_ = 0;
  absl::Time start_;
  absl::Time drawn_;
};

}  // namespace attnd::attnctl

#endif  // ATTND_CLIENT_ATTNCTL_PROGRESS_BAR_H_

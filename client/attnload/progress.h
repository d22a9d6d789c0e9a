// How a run goes, while it goes: a line that is drawn anew every second on a terminal, a line every five seconds
// elsewhere. On standard error.
#ifndef ATTND_CLIENT_ATTNLOAD_PROGRESS_H_
#define ATTND_CLIENT_ATTNLOAD_PROGRESS_H_

#include <cstdint>

#include "client/attnload/load.h"

namespace attnd::attnload {

class Progress {
 public:
  explicit Progress(bool quiet);
  ~Progress();  // wipes the line
  void Show(const Load& load);

 private:
  const bool quiet_;
  const bool terminal_;
  int64_t shown_ = 0;
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_PROGRESS_H_

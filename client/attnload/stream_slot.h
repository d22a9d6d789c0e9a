// A StepStream that is opened anew when it breaks, with a limit on its steps in flight and a deadline for each.
#ifndef ATTND_CLIENT_ATTNLOAD_STREAM_SLOT_H_
#define ATTND_CLIENT_ATTNLOAD_STREAM_SLOT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "client/attnload/backend.h"
#include "client/attnload/executor.h"
#include "client/attnload/gate.h"
#include "client/cpp/client.h"

namespace attnd::attnload {

// Thread-safe. The deadline of a step is the client's default_timeout; a step that misses it takes its stream and all
// that is on it with it, because one step of a stream cannot be given up alone.
class StreamSlot {
 public:
  StreamSlot(const Client& client, Executor* executor, int64_t limit);
  ~StreamSlot();  // REQUIRES: every step is done, and the executor runs nothing any more

  void Step(const client::StepRequest& request, Backend::Done<client::StepResult> done);

 private:
  struct Open;  // one stream and what is in flight on it
  std::shared_ptr<Open> Current();
  static void Watch(Executor* executor, std::weak_ptr<Open> open, Nanos timeout);

  const Client client_;
  Executor* executor_;
  Gate gate_;
  std::mutex mutex_;
  std::shared_ptr<Open> open_;
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_STREAM_SLOT_H_

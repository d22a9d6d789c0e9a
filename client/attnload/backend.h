// What a session calls. The real one is Target; tests put a slow or wrong server in its place.
#ifndef ATTND_CLIENT_ATTNLOAD_BACKEND_H_
#define ATTND_CLIENT_ATTNLOAD_BACKEND_H_

#include <cstdint>
#include <functional>
#include <stop_token>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/attnload/clock.h"
#include "client/cpp/requests.h"

namespace attnd::attnload {

// When a call left for the server and when its answer was there.
struct CallTimes {
  TimePoint sent;
  TimePoint answered;
};

// Thread-safe. Calls return at once; each `done` is called exactly once, on any thread, and must not block.
class Backend {
 public:
  template <class T>
  using Done = std::function<void(absl::StatusOr<T>, CallTimes)>;

  virtual ~Backend() = default;
  // `session` is attnload's number of it and decides which connection carries its calls. Gives the server's id.
  virtual void Create(int64_t session, const client::SessionConfig& config, Done<std::string> done) = 0;
  // The request and its tensors must stay until `done`. `unary`: not on a stream, so that `cancel` can end it.
  virtual void Step(int64_t session, const client::StepRequest& request, bool unary, std::stop_token cancel,
                    Done<client::StepResult> done) = 0;
  virtual void Close(int64_t session, const std::string& session_id, Done<bool> done) = 0;
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_BACKEND_H_

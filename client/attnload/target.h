// The server under load: connections of their own, each with unary calls and, if asked for, StepStreams.
#ifndef ATTND_CLIENT_ATTNLOAD_TARGET_H_
#define ATTND_CLIENT_ATTNLOAD_TARGET_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/attnload/backend.h"
#include "client/attnload/executor.h"
#include "client/cpp/client.h"

namespace attnd::attnload {

struct TargetOptions {
  client::ClientOptions client;
  int connections = 1;
  int streams = 0;                     // of each connection; 0: steps are unary calls
  int64_t calls_per_connection = 100;  // unary calls in flight at most: what HTTP/2 servers usually allow
  int64_t steps_per_stream = 64;       // in flight at most: as many as attnd reads ahead
};

class Target final : public Backend {
 public:
  // Errors as Client::Connect. `executor` outlives the target.
  static absl::StatusOr<std::unique_ptr<Target>> Connect(const TargetOptions& options, Executor* executor);
  ~Target() override;  // REQUIRES: every call is done

  void Create(int64_t session, const client::SessionConfig& config, Done<std::string> done) override;
  void Step(int64_t session, const client::StepRequest& request, bool unary, std::stop_token cancel,
            Done<client::StepResult> done) override;
  void Close(int64_t session, const std::string& session_id, Done<bool> done) override;

  const Client& client() const;

 private:
  struct Connection;
  explicit Target(const TargetOptions& options);
  Connection& ConnectionOf(int64_t session) { return *connections_[session % options_.connections]; }

  const TargetOptions options_;
  std::vector<std::unique_ptr<Connection>> connections_;
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_TARGET_H_

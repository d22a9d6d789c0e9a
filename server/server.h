// attnd in one object: engine, edge, gRPC server, metrics, drain. main() builds one; so do the tests.
// Thread-safe.
#ifndef ATTND_SERVER_SERVER_H_
#define ATTND_SERVER_SERVER_H_

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/options.h"

namespace attnd {

class AttentionService;
class Engine;
class GrpcServer;
class Metrics;
class MetricsServer;

class Server {
 public:
  // Checks this machine's kernels, then listens and serves. The status says in a sentence what is wrong: an option, a
  // port, a file, the machine.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const Options& options);
  // Ends what is left at once.
  ~Server();

  const Options& options() const { return options_; }  // resolved
  const std::string& address() const;
  std::string metrics_address() const;  // empty when there is no such port

  // Health says NOT_SERVING and new calls are refused from the first moment; running steps finish and streams end.
  // Returns once nothing is left, or after the drain timeout with what was left answered UNAVAILABLE.
  // True: nothing was cut off.
  bool Drain();
  // After Drain: saves the sessions where options().snapshot_on_drain says, and logs how that went. True: all of them,
  // or nothing was to be saved.
  bool SaveSessions();
  // Makes a Drain or SaveSessions that is in progress, or comes later, wait no longer. Signal handlers' threads call
  // it.
  void Hurry() { hurry_.store(true, std::memory_order_release); }

  Engine& engine() { return *engine_; }
  Metrics& metrics() { return *metrics_; }
  GrpcServer& grpc_server() { return *grpc_server_; }

 private:
  Server() = default;
  bool WaitForCalls(absl::Time deadline);
  absl::Status RestoreSessions();
  void Linger(absl::Time until);  // less if it is to hurry

  Options options_;
  std::atomic<bool> hurry_{false};
  bool drained_ = false;
  // In the order of their making; they end in the reverse one.
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<AttentionService> service_;
  std::unique_ptr<GrpcServer> grpc_server_;
  std::unique_ptr<MetricsServer> metrics_server_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_SERVER_H_

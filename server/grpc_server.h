// The gRPC server: its port, credentials, limits, health and reflection. The only file of the server beside rpc/ that
// includes gRPC. Thread-safe once started.
#ifndef ATTND_SERVER_GRPC_SERVER_H_
#define ATTND_SERVER_GRPC_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/options.h"

namespace grpc {
class Server;
class Service;
namespace experimental {
class ExternalConnectionAcceptor;
}
}  // namespace grpc

namespace attnd {

class Acceptor;

class GrpcServer {
 public:
  // Listens and serves. UNAVAILABLE, naming the address, when it cannot be bound; INVALID_ARGUMENT when the TLS files
  // cannot be used. `service` must outlive the server. `on_refused` is told of each connection that was refused because
  // as many were open as may be. REQUIRES: options are resolved.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(const Options& options, grpc::Service* service,
                                                           std::function<void()> on_refused);
  ~GrpcServer();

  const std::string& address() const;  // with the port that was taken

  // What grpc.health.v1 says of "" and of attnd.v1.Attention; watchers are told.
  void SetServing(bool serving);

  // Takes no more connections or calls; calls that still run after `grace` are cancelled. Waits until the last one has
  // ended. May be called more than once.
  void Shutdown(absl::Duration grace);

  // For tests: what a channel inside this process connects to.
  grpc::Server* server() { return server_.get(); }

 private:
  GrpcServer() = default;

  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> entrance_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Acceptor> acceptor_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_GRPC_SERVER_H_

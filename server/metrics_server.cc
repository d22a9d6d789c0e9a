#include "server/metrics_server.h"

#include <prometheus/exposer.h>

#include <exception>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace attnd {

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(
    const std::string& address, const std::shared_ptr<prometheus::Collectable>& collectable) {
  std::unique_ptr<MetricsServer> server(new MetricsServer);
  server->collectable_ = collectable;
  try {
    // A connection that says nothing holds one of the threads until its time is out: with the defaults (2 threads, 30
    // s) two such connections would make the target look down.
    server->exposer_ = std::make_unique<prometheus::Exposer>(std::vector<std::string>{
        "listening_ports", address, "num_threads", "8", "request_timeout_ms", "1000", "keep_alive_timeout_ms", "1000"});
  } catch (const std::exception&) {
    return absl::UnavailableError(absl::StrCat("cannot serve metrics on ", address,
                                               " (--metrics_listen): the port is in use, or the address is not one of "
                                               "this machine"));
  }
  // /metrics holds our families, and the exposer's own under their exposer_ prefix.
  server->exposer_->RegisterCollectable(server->collectable_);
  const std::vector<int> ports = server->exposer_->GetListeningPorts();
  const absl::string_view host = absl::string_view(address).substr(0, address.rfind(':'));
  server->address_ = ports.empty() ? address : absl::StrCat(host, ":", ports[0]);
  return server;
}

MetricsServer::~MetricsServer() = default;

}  // namespace attnd

// What attnd tells over HTTP: /metrics for Prometheus, / for people, /status.json for the page at / and for scripts,
// /healthz and /readyz for whoever restarts it or sends it work. No answer waits for a computation, none holds a
// session's id. See deploy/METRICS.md.
#ifndef ATTND_SERVER_METRICS_SERVER_H_
#define ATTND_SERVER_METRICS_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace attnd {

class HttpServer;
class Metrics;

class MetricsServer {
 public:
  // `metrics` must live as long as the server. UNAVAILABLE, naming the address, when it cannot be bound.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(const std::string& address, const Metrics& metrics,
                                                              int compute_threads);
  ~MetricsServer();  // waits for a scrape that is being answered

  const std::string& address() const { return address_; }  // with the port that was taken

 private:
  MetricsServer() = default;

  std::string address_;
  std::unique_ptr<HttpServer> http_server_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_METRICS_SERVER_H_

#include "server/metrics_server.h"

#include <prometheus/collectable.h>

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "server/http_server.h"
#include "server/metrics.h"
#include "server/status_json.h"
#include "server/status_page/status_page.h"

namespace attnd {
namespace {

HttpAnswer Readiness(const Metrics& metrics) {
  if (metrics.draining()) return {.status = 503, .body = "draining\n"};
  if (!metrics.ready()) return {.status = 503, .body = "starting\n"};
  return {.body = "ready\n"};
}

HttpAnswer Answer(absl::string_view path, const Metrics& metrics, int compute_threads) {
  if (path == "/metrics") {
    return {.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = metrics.Text()};
  }
  if (path == "/") {
    return {.content_type = "text/html; charset=utf-8",
            .body = kStatusPage,
            .content_security_policy = kStatusPageSecurityPolicy};
  }
  if (path == "/status.json") {
    return {.content_type = "application/json",
            .body = StatusJson(metrics.collectable()->Collect(), compute_threads, absl::Now())};
  }
  if (path == "/healthz") return {.body = "ok\n"};
  if (path == "/readyz") return Readiness(metrics);
  return {.status = 404, .body = "Nothing here. There are / /metrics /status.json /healthz /readyz\n"};
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsServer>> MetricsServer::Start(const std::string& address, const Metrics& metrics,
                                                                    int compute_threads) {
  auto http_server = HttpServer::Start(
      address, [&metrics, compute_threads](absl::string_view path) { return Answer(path, metrics, compute_threads); });
  if (!http_server.ok()) {
    return absl::UnavailableError(absl::StrCat("cannot serve metrics on ", address,
                                               " (--metrics_listen): the port is in use, or the address is not one of "
                                               "this machine"));
  }
  std::unique_ptr<MetricsServer> server(new MetricsServer);
  server->http_server_ = *std::move(http_server);
  const absl::string_view host = absl::string_view(address).substr(0, address.rfind(':'));
  server->address_ = absl::StrCat(host, ":", server->http_server_->port());
  return server;
}

MetricsServer::~MetricsServer() = default;

}  // namespace attnd

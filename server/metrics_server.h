// http://address/metrics for Prometheus. Keeps civetweb, and its exceptions, out of everything else.
#ifndef ATTND_SERVER_METRICS_SERVER_H_
#define ATTND_SERVER_METRICS_SERVER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace prometheus {
class Collectable;
class Exposer;
}  // namespace prometheus

namespace attnd {

class MetricsServer {
 public:
  // UNAVAILABLE, naming the address, when it cannot be bound.
  static absl::StatusOr<std::unique_ptr<MetricsServer>> Start(
      const std::string& address, const std::shared_ptr<prometheus::Collectable>& collectable);
  ~MetricsServer();  // waits for a scrape that is being answered

  const std::string& address() const { return address_; }  // with the port that was taken

 private:
  MetricsServer() = default;

  std::string address_;
  std::shared_ptr<prometheus::Collectable> collectable_;
  std::unique_ptr<prometheus::Exposer> exposer_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_METRICS_SERVER_H_

// The data of the status page: what /metrics says, summed up where the page sums up, as JSON. Described in
// deploy/METRICS.md.
#ifndef ATTND_SERVER_STATUS_JSON_H_
#define ATTND_SERVER_STATUS_JSON_H_

#include <prometheus/metric_family.h>

#include <string>
#include <vector>

#include "absl/time/time.h"

namespace attnd {

std::string StatusJson(const std::vector<prometheus::MetricFamily>& families, int compute_threads, absl::Time now);

}  // namespace attnd

#endif  // ATTND_SERVER_STATUS_JSON_H_

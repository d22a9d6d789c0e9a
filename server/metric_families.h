// Metric families that are made when scraped: gauges of the engine, and of this process. Stateless and thread-safe.
#ifndef ATTND_SERVER_METRIC_FAMILIES_H_
#define ATTND_SERVER_METRIC_FAMILIES_H_

#include <prometheus/metric_family.h>

#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "server/rpc/attention_service.h"

namespace attnd {

// Sessions, queue and cache; zeros without an engine.
void AppendEngineFamilies(const EngineStats& stats, std::vector<prometheus::MetricFamily>* families);

// Whether sessions make room for others, and the disk that they go to; zeros where there is none. Asks that file
// system.
void AppendEvictionFamilies(bool evicts, const std::string& spill_dir, std::vector<prometheus::MetricFamily>* families);

// What the edge holds of requests, and its bounds; zeros without a service.
void AppendEdgeFamilies(const EdgeStats& stats, std::vector<prometheus::MetricFamily>* families);

// The process_* metrics that every client library of Prometheus has, from /proc/self.
void AppendProcessFamilies(std::vector<prometheus::MetricFamily>* families);

}  // namespace attnd

#endif  // ATTND_SERVER_METRIC_FAMILIES_H_

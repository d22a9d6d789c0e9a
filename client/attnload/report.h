// What a run is told as: a summary to read, JSON to compute with, a page to look at.
#ifndef ATTND_CLIENT_ATTNLOAD_REPORT_H_
#define ATTND_CLIENT_ATTNLOAD_REPORT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/attnload/capacity.h"
#include "client/attnload/run.h"

namespace attnd::attnload {

// `capacity`: the trials before, if the run was the best of a search.
std::string TextReport(const RunReport& report);
std::string CapacityTable(const CapacityResult& capacity);
std::string JsonReport(const RunReport& report, const CapacityResult* capacity);
// One self-contained page, made of the JSON.
std::string HtmlReport(const std::string& json);

absl::Status WriteFile(const std::string& path, const std::string& text);

// The percentiles that every table shows: 0.5, 0.9, ... and their names "p50", "p90", ...
struct NamedQuantile {
  const char* name;
  double quantile;
};
inline constexpr NamedQuantile kQuantiles[] = {{"p50", 0.5},  {"p90", 0.9},     {"p95", 0.95},
                                               {"p99", 0.99}, {"p99.9", 0.999}, {"p99.99", 0.9999}};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_REPORT_H_

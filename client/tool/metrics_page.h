// Reads a server's metrics page.
#ifndef ATTND_CLIENT_TOOL_METRICS_PAGE_H_
#define ATTND_CLIENT_TOOL_METRICS_PAGE_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace attnd::tool {

// What a --metrics flag means: a URL, or HOST:PORT, whose page is /metrics; empty for empty.
std::string MetricsUrl(const std::string& flag);

// GET of http://host[:port]/path. INVALID_ARGUMENT: another kind of URL · UNAVAILABLE: no connection, or an answer
// that is not 200 · DEADLINE_EXCEEDED.
absl::StatusOr<std::string> FetchPage(const std::string& url, absl::Duration timeout);

// The sample lines (not the comments) of the page whose names begin with one of the prefixes.
std::vector<std::string> SelectSamples(const std::string& page, const std::vector<std::string>& prefixes);

}  // namespace attnd::tool

#endif  // ATTND_CLIENT_TOOL_METRICS_PAGE_H_

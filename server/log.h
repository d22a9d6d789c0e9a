// A line per event on standard error, for people and for machines:
//   2026-01-31T12:00:00.123Z WARNING listening beyond loopback without TLS address=0.0.0.0:50051
// Values that hold spaces, quotes or control characters are quoted. (abseil's own log library is newer than the oldest
// system that attnd builds on.) Thread-safe: a line is one write.
#ifndef ATTND_SERVER_LOG_H_
#define ATTND_SERVER_LOG_H_

#include <initializer_list>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace attnd {

enum class LogLevel { kInfo, kWarning, kError };

using LogFields = std::initializer_list<std::pair<absl::string_view, std::string>>;

void Log(LogLevel level, absl::string_view event, LogFields fields = {});

// The line itself, without its end.
std::string FormatLogLine(absl::Time time, LogLevel level, absl::string_view event, LogFields fields);

}  // namespace attnd

#endif  // ATTND_SERVER_LOG_H_

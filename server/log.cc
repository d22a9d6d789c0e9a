#include "server/log.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace attnd {
namespace {

absl::string_view LevelName(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return "INFO";
    case LogLevel::kWarning:
      return "WARNING";
    case LogLevel::kError:
      break;
  }
  return "ERROR";
}

void AppendValue(absl::string_view value, std::string* line) {
  const bool plain = !value.empty() && std::all_of(value.begin(), value.end(), [](unsigned char c) {
    return absl::ascii_isgraph(c) && c != '"' && c != '\\';
  });
  if (plain) {
    absl::StrAppend(line, value);
  } else {
    absl::StrAppend(line, "\"", absl::CHexEscape(value), "\"");
  }
}

}  // namespace

std::string FormatLogLine(absl::Time time, LogLevel level, absl::string_view event, LogFields fields) {
  std::string line = absl::StrCat(absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", time, absl::UTCTimeZone()), " ",
                                  LevelName(level), " ", event);
  for (const auto& [key, value] : fields) {
    absl::StrAppend(&line, " ", key, "=");
    AppendValue(value, &line);
  }
  return line;
}

void Log(LogLevel level, absl::string_view event, LogFields fields) {
  const std::string line = FormatLogLine(absl::Now(), level, event, fields) + "\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace attnd

// Statuses with a reason: how the engine and the edge say, beside the gRPC code and the sentence, which of the wire
// contract's reasons it was, the numbers that disagree, and whether waiting helps.
#ifndef ATTND_SERVER_ENGINE_ERRORS_H_
#define ATTND_SERVER_ENGINE_ERRORS_H_

#include <initializer_list>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace attnd {

struct ErrorDetails {
  std::string reason;
  std::map<std::string, std::string> metadata;
  absl::Duration retry_delay = absl::ZeroDuration();  // zero: waiting does not help
};

// A status whose payload carries the details.
absl::Status MakeError(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                       std::initializer_list<std::pair<const std::string, std::string>> metadata = {},
                       absl::Duration retry_delay = absl::ZeroDuration());

// Details of a status made by MakeError; empty for others.
ErrorDetails GetErrorDetails(const absl::Status& status);

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_ERRORS_H_

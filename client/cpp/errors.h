// What an error from attnd says beside its code and sentence.
//
// Every call of the client returns an absl::Status whose code is the gRPC code and whose message is the server's
// sentence. The reason word of the wire contract (BAD_POSITION, CACHE_FULL, ...), the numbers that disagree and the
// delay after which a retry makes sense travel as payloads of the status; these functions read them.
#ifndef ATTND_CLIENT_CPP_ERRORS_H_
#define ATTND_CLIENT_CPP_ERRORS_H_

#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace attnd::client {

struct ErrorDetails {
  std::string reason;                           // UPPER_SNAKE_CASE; empty: the error is not attnd's own
  std::string domain;                           // "attnd", or "attnd.client" when the client itself refused
  std::map<std::string, std::string> metadata;  // e.g. {"length": "576"} with BAD_POSITION
  std::optional<absl::Duration> retry_delay;    // set: waiting this long helps
};

// Empty for an OK status and for errors that carry no details (a refused connection, a deadline).
ErrorDetails GetErrorDetails(const absl::Status& status);

// The server no longer has the session (NOT_FOUND: it restarted, or the session expired or was evicted or closed;
// DATA_LOSS with SPILL_DAMAGED: it was on disk and its file is damaged): create another and send its tokens again from
// position 0. The message says so too.
bool IsSessionLost(const absl::Status& status);

}  // namespace attnd::client

#endif  // ATTND_CLIENT_CPP_ERRORS_H_

// Session ids: 128 bits from the system's generator, on the wire as 32 lower-case hexadecimal digits. Nothing about a
// session can be guessed from another's id.
#ifndef ATTND_SERVER_ENGINE_SESSION_ID_H_
#define ATTND_SERVER_ENGINE_SESSION_ID_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace attnd {

struct SessionId {
  uint64_t high = 0, low = 0;
  friend bool operator==(const SessionId&, const SessionId&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const SessionId& id) {
    return H::combine(std::move(h), id.high, id.low);
  }
};

SessionId NewSessionId();
std::string FormatSessionId(SessionId id);
// INVALID_ARGUMENT (BAD_SESSION_ID) unless `text` is exactly 32 lower-case hexadecimal digits: one id, one spelling.
absl::StatusOr<SessionId> ParseSessionId(absl::string_view text);

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_SESSION_ID_H_

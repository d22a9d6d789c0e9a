#include "server/engine/session_id.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/engine/errors.h"

namespace attnd {
namespace {

constexpr size_t kDigits = 32;

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

SessionId NewSessionId() {
  SessionId id;
  // Up to 256 bytes are read whole or not at all, and after boot it never blocks.
  while (getrandom(&id, sizeof(id), 0) != static_cast<ssize_t>(sizeof(id))) {
    if (errno != EINTR) {
      std::perror("getrandom");  // a guessable id would be worse than no server
      std::abort();
    }
  }
  return id;
}

std::string FormatSessionId(SessionId id) { return absl::StrFormat("%016x%016x", id.high, id.low); }

absl::StatusOr<SessionId> ParseSessionId(absl::string_view text) {
  if (text.size() != kDigits) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SESSION_ID",
                     absl::StrCat("a session id has ", kDigits, " hexadecimal digits, got ", text.size(), " bytes"));
  }
  SessionId id;
  for (size_t i = 0; i < kDigits; i++) {
    const int digit = HexDigit(text[i]);
    if (digit < 0) {
      return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SESSION_ID",
                       absl::StrCat("byte ", i, " of the session id is not a lower-case hexadecimal digit"));
    }
    uint64_t& half = i < kDigits / 2 ? id.high : id.low;
    half = half << 4 | static_cast<uint64_t>(digit);
  }
  return id;
}

}  // namespace attnd

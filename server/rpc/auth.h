// Bearer tokens. A server with a token file asks every call of attnd.v1.Attention for `authorization: Bearer TOKEN`;
// health and reflection stay open, so that probes need no secret.
// Immutable after construction and so thread-safe; free of gRPC.
#ifndef ATTND_SERVER_RPC_AUTH_H_
#define ATTND_SERVER_RPC_AUTH_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace attnd {

class TokenTable {
 public:
  // One token a line; blank lines and lines that begin with '#' are skipped. A token is 16 or more printable
  // characters without spaces.
  static absl::StatusOr<std::shared_ptr<const TokenTable>> FromFile(const std::string& path);
  static absl::StatusOr<std::shared_ptr<const TokenTable>> FromText(absl::string_view text);

  // `header` is the value of `authorization`, empty when there is none. UNAUTHENTICATED when it is missing, malformed
  // or holds a token that is not in the table; how long that takes does not tell how much of a token was right.
  absl::Status Check(absl::string_view header) const;

  size_t size() const { return tokens_.size(); }

 private:
  std::vector<std::string> tokens_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_AUTH_H_

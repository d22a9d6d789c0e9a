// The flags of a connection, which every command that talks to a server has.
#ifndef ATTND_CLIENT_TOOL_CONNECTION_FLAGS_H_
#define ATTND_CLIENT_TOOL_CONNECTION_FLAGS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "client/tool/flags.h"

namespace attnd::tool {

// The server's address under `address_flag`, --timeout, --tls, --tls_roots, --tls_name, --tls_cert, --tls_key,
// --token_file. The server's default comes from ATTND_SERVER.
class ConnectionFlags {
 public:
  explicit ConnectionFlags(FlagSet* flags, const std::string& address_flag = "server",
                           absl::Duration default_timeout = absl::Seconds(30));
  // Reads the files named. NOT_FOUND: one cannot be read.
  absl::StatusOr<client::ClientOptions> Options(const std::string& user_agent) const;
  const std::string& server() const { return server_; }

 private:
  std::string server_;
  absl::Duration timeout_;
  bool tls_ = false;
  std::string tls_roots_, tls_name_, tls_cert_, tls_key_;
  std::string token_file_;
};

absl::StatusOr<std::string> ReadFile(const std::string& path);  // "-": standard input

}  // namespace attnd::tool

#endif  // ATTND_CLIENT_TOOL_CONNECTION_FLAGS_H_

// What every subcommand that talks to a server shares: the flags of the connection, and how errors are printed.
#ifndef ATTND_CLIENT_ATTNCTL_CONNECTION_H_
#define ATTND_CLIENT_ATTNCTL_CONNECTION_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/attnctl/flags.h"
#include "client/cpp/client.h"

namespace attnd::attnctl {

// --server, --timeout, --tls, --tls_roots, --tls_name, --tls_cert, --tls_key, --token_file. The server's default comes
// from ATTND_SERVER.
class ConnectionFlags {
 public:
  explicit ConnectionFlags(FlagSet* flags);
  absl::StatusOr<Client> Connect() const;
  const std::string& server() const { return server_; }

 private:
  std::string server_;
  absl::Duration timeout_ = absl::Seconds(30);
  bool tls_ = false;
  std::string tls_roots_, tls_name_, tls_cert_, tls_key_;
  std::string token_file_;
};

// Parses; when the command is over already (--help, or a mistake, which is printed), returns its exit status.
std::optional<int> ParseOrExit(FlagSet* flags, const std::vector<std::string>& arguments,
                               std::vector<std::string>* positional = nullptr);

// "attnctl: UNAVAILABLE: ..." with reason, numbers and retry delay, on standard error. Returns kFailed.
int PrintError(const absl::Status& status, const std::string& server = {});

// The same for a mistake on the command line that only shows when flags are put together. Returns kUsage.
int PrintUsageError(const absl::Status& status);

absl::StatusOr<std::string> ReadFile(const std::string& path);  // "-": standard input

// "1.50 GiB", exact where it is a whole number of the unit.
std::string HumanBytes(double bytes);

}  // namespace attnd::attnctl

#endif  // ATTND_CLIENT_ATTNCTL_CONNECTION_H_

#include "client/attnctl/connection.h"

#include <iostream>
#include <utility>

#include "absl/time/time.h"
#include "client/attnctl/commands.h"

namespace attnd::attnctl {

absl::StatusOr<Client> Connect(const tool::ConnectionFlags& flags) {
  absl::StatusOr<client::ClientOptions> options = flags.Options("attnctl");
  if (!options.ok()) return options.status();
  // Someone waits at a terminal: a server that is down should be said within a second.
  options->retry.max_attempts = 3;
  return Client::Connect(*std::move(options));
}

std::optional<int> ParseOrExit(FlagSet* flags, const std::vector<std::string>& arguments,
                               std::vector<std::string>* positional) {
  absl::Status status = flags->Parse(arguments, positional);
  if (!status.ok()) return PrintUsageError(status);
  if (!flags->help_wanted()) return std::nullopt;
  std::cout << flags->Help();
  return kDone;
}

int PrintError(const absl::Status& status, const std::string& server) {
  const client::ErrorDetails details = client::GetErrorDetails(status);
  std::cerr << "attnctl: " << absl::StatusCodeToString(status.code());
  if (!details.reason.empty()) std::cerr << " (" << details.reason << ")";
  std::cerr << ": " << status.message();
  for (const auto& [key, value] : details.metadata) std::cerr << "\n  " << key << ": " << value;
  if (details.retry_delay) std::cerr << "\n  try again in " << absl::FormatDuration(*details.retry_delay);
  if (!server.empty() && (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status))) {
    std::cerr << "\n  the server asked was " << server << " (--server, ATTND_SERVER)";
  }
  std::cerr << "\n";
  return kFailed;
}

int PrintUsageError(const absl::Status& status) {
  std::cerr << "attnctl: " << status.message() << " (--help lists what there is)\n";
  return kUsage;
}

}  // namespace attnd::attnctl

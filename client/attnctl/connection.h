// What every subcommand that talks to a server shares: the flags of the connection, and how errors are printed.
#ifndef ATTND_CLIENT_ATTNCTL_CONNECTION_H_
#define ATTND_CLIENT_ATTNCTL_CONNECTION_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/client.h"
#include "client/tool/connection_flags.h"
#include "client/tool/flags.h"
#include "client/tool/human.h"
#include "client/tool/metrics_page.h"
#include "client/tool/model_flags.h"

namespace attnd::attnctl {

using tool::FetchPage;
using tool::FlagSet;
using tool::HumanBytes;
using tool::ModelFlags;
using tool::ReadFile;
using tool::SelectSamples;

// As attnctl, and giving up soon.
absl::StatusOr<Client> Connect(const tool::ConnectionFlags& flags);

// Parses; when the command is over already (--help, or a mistake, which is printed), returns its exit status.
std::optional<int> ParseOrExit(FlagSet* flags, const std::vector<std::string>& arguments,
                               std::vector<std::string>* positional = nullptr);

// "attnctl: UNAVAILABLE: ..." with reason, numbers and retry delay, on standard error. Returns kFailed.
int PrintError(const absl::Status& status, const std::string& server = {});

// The same for a mistake on the command line that only shows when flags are put together. Returns kUsage.
int PrintUsageError(const absl::Status& status);

}  // namespace attnd::attnctl

#endif  // ATTND_CLIENT_ATTNCTL_CONNECTION_H_

// attnctl health.
#include <iostream>
#include <string>

#include "client/attnctl/commands.h"
#include "client/attnctl/connection.h"

namespace attnd::attnctl {
namespace {

constexpr char kSummary[] =
    "Asks the standard health service (grpc.health.v1). Exit status 0 only when the answer is SERVING: for the\n"
    "health check of a container. Needs no token.";

}  // namespace

int RunHealth(const Arguments& arguments) {
  FlagSet flags("attnctl health [FLAG...]", kSummary);
  tool::ConnectionFlags connection(&flags);
  std::string service;
  flags.String("service", &service, "the service asked about, such as attnd.v1.Attention; empty: the whole server");
  if (auto exit = ParseOrExit(&flags, arguments)) return *exit;
  absl::StatusOr<Client> client = Connect(connection);
  if (!client.ok()) return PrintError(client.status());
  absl::StatusOr<bool> serving = client->IsServing(service);
  if (!serving.ok()) return PrintError(serving.status(), connection.server());
  std::cout << (*serving ? "SERVING" : "NOT_SERVING") << "\n";
  return *serving ? kDone : kFailed;
}

}  // namespace attnd::attnctl

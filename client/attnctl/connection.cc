#include "client/attnctl/connection.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/attnctl/commands.h"

namespace attnd::attnctl {

ConnectionFlags::ConnectionFlags(FlagSet* flags) {
  const char* environment = std::getenv("ATTND_SERVER");
  server_ = environment != nullptr && *environment != '\0' ? environment : "127.0.0.1:50051";
  flags->String("server", &server_, "host:port of attnd; ATTND_SERVER in the environment sets the default");
  flags->Seconds("timeout", &timeout_, "deadline of each call");
  flags->Switch("tls", &tls_, "encrypt; the system's certificate roots unless --tls_roots is given");
  flags->String("tls_roots", &tls_roots_, "PEM file of certificate roots; implies --tls");
  flags->String("tls_name", &tls_name_, "name in the server's certificate, where it is not the one in --server");
  flags->String("tls_cert", &tls_cert_, "PEM file of a client certificate chain, where the server asks for one");
  flags->String("tls_key", &tls_key_, "PEM file of its private key");
  flags->String("token_file", &token_file_, "file that holds the bearer token");
}

absl::StatusOr<Client> ConnectionFlags::Connect() const {
  client::ClientOptions options;
  options.target = server_;
  options.default_timeout = timeout_;
  options.user_agent = "attnctl";
  // Someone waits at a terminal: a server that is down should be said within a second.
  options.retry.max_attempts = 3;
  options.tls.enabled = tls_ || !tls_roots_.empty();
  options.tls.server_name = tls_name_;
  for (const auto& [path, content] :
       {std::pair(&tls_roots_, &options.tls.root_certificates), std::pair(&tls_cert_, &options.tls.client_certificate),
        std::pair(&tls_key_, &options.tls.client_key)}) {
    if (path->empty()) continue;
    absl::StatusOr<std::string> text = ReadFile(*path);
    if (!text.ok()) return text.status();
    *content = *std::move(text);
  }
  if (!token_file_.empty()) {
    absl::StatusOr<std::string> token = ReadFile(token_file_);
    if (!token.ok()) return token.status();
    options.bearer_token = std::string(absl::StripAsciiWhitespace(*token));
  }
  return Client::Connect(std::move(options));
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

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  if (path == "-") return std::string(std::istreambuf_iterator<char>(std::cin), {});
  std::ifstream file(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (!file.is_open() || file.bad()) return absl::NotFoundError(absl::StrCat("cannot read '", path, "'"));
  return text;
}

std::string HumanBytes(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(units)) {
    bytes /= 1024;
    ++unit;
  }
  if (bytes == std::floor(bytes)) return absl::StrFormat("%.0f %s", bytes, units[unit]);
  return absl::StrFormat("%.2f %s", bytes, units[unit]);
}

}  // namespace attnd::attnctl

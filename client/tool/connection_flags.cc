#include "client/tool/connection_flags.h"

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace attnd::tool {

ConnectionFlags::ConnectionFlags(FlagSet* flags, const std::string& address_flag, absl::Duration default_timeout)
    : timeout_(default_timeout) {
  const char* environment = std::getenv("ATTND_SERVER");
  server_ = environment != nullptr && *environment != '\0' ? environment : "127.0.0.1:50051";
  flags->String(address_flag, &server_, "host:port of attnd; ATTND_SERVER in the environment sets the default");
  flags->Seconds("timeout", &timeout_, "deadline of each call");
  flags->Switch("tls", &tls_, "encrypt; the system's certificate roots unless --tls_roots is given");
  flags->String("tls_roots", &tls_roots_, "PEM file of certificate roots; implies --tls");
  flags->String("tls_name", &tls_name_, "name in the server's certificate, where it is not the one connected to");
  flags->String("tls_cert", &tls_cert_, "PEM file of a client certificate chain, where the server asks for one");
  flags->String("tls_key", &tls_key_, "PEM file of its private key");
  flags->String("token_file", &token_file_, "file that holds the bearer token");
}

absl::StatusOr<client::ClientOptions> ConnectionFlags::Options(const std::string& user_agent) const {
  client::ClientOptions options;
  options.target = server_;
  options.default_timeout = timeout_;
  options.user_agent = user_agent;
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
  return options;
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  if (path == "-") return std::string(std::istreambuf_iterator<char>(std::cin), {});
  std::ifstream file(path, std::ios::binary);
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (!file.is_open() || file.bad()) return absl::NotFoundError(absl::StrCat("cannot read '", path, "'"));
  return text;
}

}  // namespace attnd::tool

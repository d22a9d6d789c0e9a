#include "client/tool/metrics_page.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace attnd::tool {
namespace {

struct Url {
  std::string host;
  std::string port = "80";
  std::string path = "/";
};

absl::StatusOr<Url> ParseUrl(const std::string& text) {
  constexpr char kScheme[] = "http://";
  if (!absl::StartsWith(text, kScheme))
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not http://..."));
  const std::string rest = text.substr(std::strlen(kScheme));
  Url url;
  const size_t slash = rest.find('/');
  url.host = rest.substr(0, slash);
  if (slash != std::string::npos) url.path = rest.substr(slash);
  const size_t colon = url.host.rfind(':');
  if (colon != std::string::npos && !absl::EndsWith(url.host, "]")) {
    url.port = url.host.substr(colon + 1);
    url.host.resize(colon);
  }
  if (absl::StartsWith(url.host, "[")) url.host = url.host.substr(1, url.host.size() - 2);
  if (url.host.empty()) return absl::InvalidArgumentError(absl::StrCat("'", text, "' names no host"));
  return url;
}

absl::Status SystemError(const std::string& what) {
  const std::string message = absl::StrCat(what, ": ", std::strerror(errno));
  if (errno == EAGAIN || errno == EINPROGRESS) return absl::DeadlineExceededError(message);
  return absl::UnavailableError(message);
}

absl::StatusOr<int> ConnectTo(const Url& url, absl::Duration timeout) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* addresses = nullptr;
  const int failure = getaddrinfo(url.host.c_str(), url.port.c_str(), &hints, &addresses);
  if (failure != 0) return absl::UnavailableError(absl::StrCat(url.host, ":", url.port, ": ", gai_strerror(failure)));
  const absl::Cleanup free_addresses = [addresses] { freeaddrinfo(addresses); };
  absl::Status status = absl::UnavailableError("no address");
  for (const addrinfo* a = addresses; a != nullptr; a = a->ai_next) {
    const int fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, a->ai_protocol);
    if (fd < 0) continue;
    const timeval limit = absl::ToTimeval(timeout);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));  // bounds connect as well
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    if (connect(fd, a->ai_addr, a->ai_addrlen) == 0) return fd;
    status = SystemError(absl::StrCat("connecting to ", url.host, ":", url.port));
    close(fd);
  }
  return status;
}

}  // namespace

absl::StatusOr<std::string> FetchPage(const std::string& url_text, absl::Duration timeout) {
  absl::StatusOr<Url> url = ParseUrl(url_text);
  if (!url.ok()) return url.status();
  absl::StatusOr<int> fd = ConnectTo(*url, timeout);
  if (!fd.ok()) return fd.status();
  const absl::Cleanup close_socket = [&fd] { close(*fd); };
  // HTTP/1.0: the answer ends where the connection does, so there are no chunks to put together.
  const std::string request = absl::StrCat("GET ", url->path, " HTTP/1.0\r\nHost: ", url->host, "\r\n\r\n");
  if (send(*fd, request.data(), request.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(request.size())) {
    return SystemError("sending to the metrics page");
  }
  std::string answer;
  char buffer[65536];
  ssize_t count = 0;
  while ((count = recv(*fd, buffer, sizeof(buffer), 0)) > 0) answer.append(buffer, static_cast<size_t>(count));
  if (count < 0) return SystemError("reading the metrics page");
  const size_t header_end = answer.find("\r\n\r\n");
  const std::string first_line = answer.substr(0, answer.find("\r\n"));
  if (header_end == std::string::npos || !absl::StrContains(first_line, " 200")) {
    return absl::UnavailableError(absl::StrCat("the metrics page answered '", first_line, "'"));
  }
  return answer.substr(header_end + 4);
}

std::string MetricsUrl(const std::string& flag) {
  if (flag.empty() || absl::StrContains(flag, "://")) return flag;
  return absl::StrCat("http://", flag, absl::StrContains(flag, "/") ? "" : "/metrics");
}

std::vector<std::string> SelectSamples(const std::string& page, const std::vector<std::string>& prefixes) {
  std::vector<std::string> samples;
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    const bool wanted = std::any_of(prefixes.begin(), prefixes.end(),
                                    [&](const std::string& prefix) { return absl::StartsWith(line, prefix); });
    if (wanted) samples.push_back(line);
  }
  return samples;
}

}  // namespace attnd::tool

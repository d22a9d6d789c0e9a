#include "server/acceptor.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "server/log.h"

namespace attnd {
namespace {

// Descriptors for all that is no connection: listeners, epoll sets, scrapes, files read from /proc.
constexpr int kReservedFiles = 64;
constexpr int kMostByDefault = 4096;  // an idle one takes about 17 kB
constexpr absl::Duration kWarningPeriod = absl::Seconds(10);
// Between two looks at a listener that the system has no memory or descriptors for.
constexpr int kPauseMs = 20;

int64_t OpenFileLimit() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return 1024;
  return static_cast<int64_t>(std::min<rlim_t>(files.rlim_cur, 1 << 20));
}

absl::Status CannotListen(const std::string& address, absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("cannot listen on ", address, " (--listen): ", why));
}

// A socket that listens, or -1 with errno.
int OpenListener(const sockaddr* address, socklen_t length) {
  const int listener = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (listener < 0) return -1;
  const int on = 1, off = 0;
  // Both are inherited by the connections. Without the first, a restart would have to wait for old connections' ends.
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (address->sa_family != AF_UNIX) setsockopt(listener, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  if (address->sa_family == AF_INET6) setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  if (bind(listener, address, length) == 0 && listen(listener, SOMAXCONN) == 0) return listener;
  const int error = errno;
  close(listener);
  errno = error;
  return -1;
}

int PortOf(int listener) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  getsockname(listener, reinterpret_cast<sockaddr*>(&storage), &length);
  if (storage.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(storage).sin6_port);
  return ntohs(reinterpret_cast<const sockaddr_in&>(storage).sin_port);
}

void SetPort(int port, sockaddr* address) {
  if (address->sa_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address)->sin6_port = htons(static_cast<uint16_t>(port));
  } else {
    reinterpret_cast<sockaddr_in*>(address)->sin_port = htons(static_cast<uint16_t>(port));
  }
}

// Whether a socket's file was left behind by a process that is gone.
bool IsStale(const sockaddr_un& address) {
  struct stat file{};
  if (stat(address.sun_path, &file) != 0 || !S_ISSOCK(file.st_mode)) return false;
  const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool refused =
      connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 && errno == ECONNREFUSED;
  close(probe);
  return refused;
}

int OpenSpare() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

}  // namespace

int MostConnections() {
  const int64_t files = OpenFileLimit();
  return static_cast<int>(files - std::min<int64_t>(kReservedFiles, files / 2));
}

int DefaultMaxConnections() { return std::min(MostConnections(), kMostByDefault); }

void RaiseOpenFileLimit() {
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= files.rlim_max) return;
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
}

absl::StatusOr<std::unique_ptr<Acceptor>> Acceptor::Listen(const std::string& address) {
  std::unique_ptr<Acceptor> acceptor(new Acceptor);
  acceptor->address_ = address;
  absl::Status status;
  if (absl::StartsWith(address, "unix:")) {
    absl::string_view path = absl::StripPrefix(address, "unix:");
    if (absl::StartsWith(path, "///")) path.remove_prefix(2);
    status = acceptor->ListenUnix(std::string(path));
  } else {
    const size_t colon = address.rfind(':');
    const absl::string_view host = absl::string_view(address).substr(0, colon);
    const std::string bare(absl::StripSuffix(absl::StripPrefix(host, "["), "]"));
    status = acceptor->ListenTcp(bare, address.substr(colon + 1));
    if (status.ok()) acceptor->address_ = absl::StrCat(host, ":", PortOf(acceptor->listeners_[0]));
  }
  if (!status.ok()) return status;
  acceptor->stop_event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  acceptor->spare_ = OpenSpare();
  return acceptor;
}

absl::Status Acceptor::ListenTcp(const std::string& host, const std::string& port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const char* const name = host.empty() || host == "*" ? nullptr : host.c_str();
  if (const int error = getaddrinfo(name, port.c_str(), &hints, &found); error != 0) {
    return CannotListen(address_, gai_strerror(error));
  }
  int taken = 0;  // of several addresses all have the first one's port
  int error = 0;
  for (addrinfo* each = found; each != nullptr; each = each->ai_next) {
    if (taken != 0) SetPort(taken, each->ai_addr);
    const int listener = OpenListener(each->ai_addr, each->ai_addrlen);
    if (listener < 0) {
      if (error == 0) error = errno;
      continue;
    }
    listeners_.push_back(listener);
    taken = PortOf(listener);
  }
  freeaddrinfo(found);
  if (!listeners_.empty()) return absl::OkStatus();
  if (error == EADDRINUSE) return CannotListen(address_, "the port is in use");
  if (error == EADDRNOTAVAIL) return CannotListen(address_, "the address is not one of this machine");
  return CannotListen(address_, std::strerror(error));
}

absl::Status Acceptor::ListenUnix(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return CannotListen(address_, "the path is empty or too long");
  }
  path.copy(address.sun_path, path.size());
  if (IsStale(address)) unlink(path.c_str());
  const int listener = OpenListener(reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  if (listener < 0) return CannotListen(address_, errno == EADDRINUSE ? "the path is in use" : std::strerror(errno));
  listeners_.push_back(listener);
  unix_path_ = path;
  return absl::OkStatus();
}

Acceptor::~Acceptor() {
  Stop();
  if (stop_event_ >= 0) close(stop_event_);
  if (spare_ >= 0) close(spare_);
}

void Acceptor::Start(int max_connections, std::function<void(int, int)> serve, std::function<void()> refused) {
  serve_ = std::move(serve);
  refused_ = std::move(refused);
  const int first_free = dup(stop_event_);
  close(first_free);
  limit_ = first_free + max_connections;
  thread_ = std::thread([this] { Run(); });
}

void Acceptor::Stop() {
  if (thread_.joinable()) {
    eventfd_write(stop_event_, 1);
    thread_.join();
  }
  for (const int listener : std::exchange(listeners_, {})) close(listener);
  if (!unix_path_.empty()) unlink(std::exchange(unix_path_, "").c_str());
}

void Acceptor::Run() {
  std::vector<pollfd> waiting = {{stop_event_, POLLIN, 0}};
  for (const int listener : listeners_) waiting.push_back({listener, POLLIN, 0});
  for (;;) {
    if (poll(waiting.data(), waiting.size(), -1) < 0) continue;  // a signal
    if (waiting[0].revents != 0) return;
    for (size_t i = 1; i < waiting.size(); ++i) {
      if (waiting[i].revents != 0) AcceptAll(waiting[i].fd);
    }
  }
}

void Acceptor::AcceptAll(int listener) {
  constexpr int kAtATime = 64;  // then the other listeners, and the end, are looked at
  for (int i = 0; i < kAtATime; ++i) {
    const int connection = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (connection >= limit_) {
      Refuse(connection);
    } else if (connection >= 0) {
      serve_(listener, connection);
    } else if (errno == EMFILE) {
      RefuseWithoutDescriptor(listener);
    } else if (errno == EAGAIN) {
      return;
    } else if (errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      poll(nullptr, 0, kPauseMs);  // the listener stays readable: without a pause this thread would spin
      return;
    }
    // Other errors are those of the one connection, which is gone.
  }
}

void Acceptor::Refuse(int connection) {
  // A reset: the client knows at once, and the kernel keeps nothing of the connection.
  const linger reset = {.l_onoff = 1, .l_linger = 0};
  setsockopt(connection, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  close(connection);
  refused_();
  const absl::Time now = absl::Now();
  if (now < next_warning_) return;
  next_warning_ = now + kWarningPeriod;
  Log(LogLevel::kWarning, "as many connections are open as may be: more are refused (--max_connections)");
}

void Acceptor::RefuseWithoutDescriptor(int listener) {
  close(spare_);
  const int connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (connection >= 0) {
    Refuse(connection);
  } else {
    poll(nullptr, 0, kPauseMs);  // another thread was quicker to take what was free
  }
  spare_ = OpenSpare();
}

}  // namespace attnd

#include "server/service_manager.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace attnd {

absl::Status NotifyServiceManager(absl::string_view state) {
  const char* variable = std::getenv("NOTIFY_SOCKET");
  if (variable == nullptr || *variable == '\0') return absl::OkStatus();
  const absl::string_view path = variable;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if ((path[0] != '/' && path[0] != '@') || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("NOTIFY_SOCKET=", path, " is no socket's path"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  if (path[0] == '@') address.sun_path[0] = '\0';  // a name without a file
  const auto address_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());

  const int sender = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const ssize_t sent = sender < 0 ? -1
                                  : sendto(sender, state.data(), state.size(), MSG_NOSIGNAL,
                                           reinterpret_cast<const sockaddr*>(&address), address_bytes);
  const int error = errno;
  if (sender >= 0) close(sender);
  if (sent == static_cast<ssize_t>(state.size())) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("NOTIFY_SOCKET=", path, ": ", std::strerror(error)));
}

}  // namespace attnd

// Tells the service manager that started the process (systemd, Type=notify) how it stands: one datagram to the socket
// that NOTIFY_SOCKET names, see sd_notify(3). Does nothing where there is no such variable.
#ifndef ATTND_SERVER_SERVICE_MANAGER_H_
#define ATTND_SERVER_SERVICE_MANAGER_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace attnd {

// `state` is lines such as "READY=1" or "STOPPING=1". UNAVAILABLE when the socket takes no message, INVALID_ARGUMENT
// when the variable names none.
absl::Status NotifyServiceManager(absl::string_view state);

}  // namespace attnd

#endif  // ATTND_SERVER_SERVICE_MANAGER_H_

// The verbs of `attnctl session` that carry a session's state to a file and back. Each returns the exit status.
#ifndef ATTND_CLIENT_ATTNCTL_TRANSFER_COMMAND_H_
#define ATTND_CLIENT_ATTNCTL_TRANSFER_COMMAND_H_

#include <string>

#include "client/cpp/client.h"

namespace attnd::attnctl {

// To the file `output`, whole or not at all; "-" is standard output.
int ExportSession(const Client& client, const std::string& id, const std::string& output);
// From the file `input`; "-" is standard input. Prints the new session's id.
int ImportSession(const Client& client, const std::string& input);

}  // namespace attnd::attnctl

#endif  // ATTND_CLIENT_ATTNCTL_TRANSFER_COMMAND_H_

// The subcommands. Each takes the arguments after its name and returns the exit status: 0 only when what was asked was
// done (and, where it checks, found right), 1 when it failed, 2 when the command line was wrong.
#ifndef ATTND_CLIENT_ATTNCTL_COMMANDS_H_
#define ATTND_CLIENT_ATTNCTL_COMMANDS_H_

#include <string>
#include <vector>

namespace attnd::attnctl {

using Arguments = std::vector<std::string>;

int RunInfo(const Arguments& arguments);
int RunHealth(const Arguments& arguments);
int RunSession(const Arguments& arguments);
int RunAttend(const Arguments& arguments);
int RunEstimate(const Arguments& arguments);
int RunDemo(const Arguments& arguments);

inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;
inline constexpr int kUsage = 2;

}  // namespace attnd::attnctl

#endif  // ATTND_CLIENT_ATTNCTL_COMMANDS_H_

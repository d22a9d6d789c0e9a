// The command line of attnd: flags, their ATTND_ environment twins, --flagfile, --help, --version, --print_config.
// A flag given on the command line wins over its environment twin.
#ifndef ATTND_SERVER_FLAGS_H_
#define ATTND_SERVER_FLAGS_H_

#include <iosfwd>

#include "server/options.h"

namespace attnd {

struct CommandLine {
  enum class Action { kServe, kPrintConfig, kPrintMetricsReference, kNothing };
  Action action = Action::kServe;
  Options options;  // as given, not resolved
};

// Ends the process with status 1 and a message when the command line or the environment is wrong. --help and --version
// print what they are asked for and return kNothing.
CommandLine ParseCommandLine(int argc, char** argv);

// Every option with the value in force, one flag a line: also a --flagfile.
void PrintConfig(const Options& options, std::ostream& out);

}  // namespace attnd

#endif  // ATTND_SERVER_FLAGS_H_

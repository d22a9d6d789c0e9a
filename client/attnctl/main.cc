// attnctl: asks, drives and checks an attnd server from the command line.
#include <iostream>
#include <string>
#include <vector>

#include "client/attnctl/commands.h"

namespace attnd::attnctl {
namespace {

struct Command {
  const char* name;
  int (*run)(const Arguments&);
  const char* summary;
};

constexpr Command kCommands[] = {
    {"info", RunInfo, "the server's version, instruction set, limits and how full its cache is"},
    {"health", RunHealth, "whether the server takes work: for health checks"},
    {"session", RunSession, "list, get or close sessions; export and import them"},
    {"attend", RunAttend, "stateless attention over JSON matrices"},
    {"estimate", RunEstimate, "cache memory and traffic of a model (asks no server)"},
    {"demo", RunDemo, "real sessions against a server, every answer checked against float64"},
};

void PrintUsage(std::ostream& out) {
  out << "usage: attnctl COMMAND [FLAG...]\n\nCommands (attnctl COMMAND --help says more)\n";
  for (const Command& command : kCommands) {
    out << "  " << std::string(command.name) << std::string(10 - std::string(command.name).size(), ' ')
        << command.summary << "\n";
  }
}

int Main(const Arguments& arguments) {
  if (arguments.empty()) {
    PrintUsage(std::cerr);
    return kUsage;
  }
  if (arguments[0] == "--help" || arguments[0] == "-h" || arguments[0] == "help") {
    PrintUsage(std::cout);
    return kDone;
  }
  for (const Command& command : kCommands) {
    if (arguments[0] == command.name) return command.run({arguments.begin() + 1, arguments.end()});
  }
  std::cerr << "attnctl: unknown command '" << arguments[0] << "'\n";
  PrintUsage(std::cerr);
  return kUsage;
}

}  // namespace
}  // namespace attnd::attnctl

int main(int argc, char** argv) { return attnd::attnctl::Main({argv + 1, argv + argc}); }

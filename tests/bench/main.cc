// attnd_bench MODE [--name=value ...]: each row carries the roof measured in the same run, and the ratio to it.
#include <cstdio>
#include <string>
#include <vector>

#include "tests/bench/modes.h"

namespace {

struct Mode {
  const char* name;
  const char* help;
  int (*run)(const attnd::bench::Options& options);
};

const Mode kModes[] = {
    {"decode", "one token against --tokens of context, from memory: GB/s of K and V", attnd::bench::RunDecode},
    {"prefill", "causal attention of --tokens tokens: GFLOP/s", attnd::bench::RunPrefill},
    {"append", "writing K and V into blocks, 64 tokens and one token at a time: GB/s", attnd::bench::RunAppend},
#ifdef ATTND_BENCH_RPC
    {"rpc", "one-token step against a real attnd on loopback, beside a bare gRPC echo: steps/s", attnd::bench::RunRpc},
#endif
};

void PrintUsage() {
  std::fprintf(stderr, "usage: attnd_bench MODE [options]\n");
  for (const Mode& mode : kModes) std::fprintf(stderr, "  %-8s %s\n", mode.name, mode.help);
  std::fprintf(stderr, "options:\n%s", attnd::bench::OptionsHelp().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.empty()) {
    PrintUsage();
    return 2;
  }
  attnd::bench::Options options;
  std::string error;
  if (!attnd::bench::ParseOptions({arguments.begin() + 1, arguments.end()}, &options, &error)) {
    std::fprintf(stderr, "attnd_bench: %s\n", error.c_str());
    PrintUsage();
    return 2;
  }
  for (const Mode& mode : kModes) {
    if (arguments[0] == mode.name) return mode.run(options);
  }
  std::fprintf(stderr, "attnd_bench: no mode '%s'\n", arguments[0].c_str());
  PrintUsage();
  return 2;
}

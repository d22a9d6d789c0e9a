// attnd_bench MODE [--name=value ...]: each row carries the roof measured in the same run, and the ratio to it.
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/bench/modes.h"

namespace attnd::bench {
namespace {

void PrintUsage(std::FILE* to) {
  std::fprintf(to, "usage: attnd_bench MODE [--name=value ...]\n");
  for (const Mode& mode : Modes()) std::fprintf(to, "  %-8s %s\n", mode.name, mode.help);
  std::fprintf(to, "lists (,..) are separated by commas; every combination is a row; defaults are in parentheses\n%s",
               OptionsHelp().c_str());
}

}  // namespace

const std::vector<Mode>& Modes() {
  static const std::vector<Mode> kModes = {
      {"decode", "one token of each sequence against its whole context: GB/s of K and V", RunDecode},
      {"fork", "decode of sequences that share a prefix's blocks: GB/s, shared blocks counted once", RunFork},
      {"prefill", "causal attention of --tokens new tokens: GFLOP/s", RunPrefill},
      {"backward", "gradients of causal attention of --tokens new tokens, f32: GFLOP/s", RunBackward},
      {"append", "writing K and V into blocks: GB/s of what is read and written", RunAppend},
      {"sessions", "fork of a long session and reorder of --batch beams: references to blocks/s", RunSessions},
      {"storage", "a session to disk and back: GB/s beside plain writes and reads of as many bytes", RunStorage},
      {"scaling", "decode or prefill on 1, 2, ... --threads: what an extra core brings", RunScaling},
#ifdef ATTND_BENCH_RPC
      {"rpc", "a one-token step of a real attnd on loopback, beside a bare gRPC echo: steps/s", RunRpc},
      {"serve", "streams that decode on a real attnd, beside the kernel alone; decode latency beside a prefill",
       RunServe},
#endif
      {"suite", "the table of the README's claims, in about five minutes", RunSuite},
  };
  return kModes;
}

// Runs a mode by name with its --name=value arguments. Returns the exit status: 2 after a complaint about them.
static int RunMode(std::string_view name, const std::vector<std::string>& arguments) {
  for (const Mode& mode : Modes()) {
    if (name != mode.name) continue;
    Options options;
    std::string error;
    if (!ParseOptions(name, arguments, &options, &error)) {
      std::fprintf(stderr, "attnd_bench: %s\n(attnd_bench --help lists the options)\n", error.c_str());
      return 2;
    }
    if (options.help) {
      PrintUsage(stdout);
      return 0;
    }
    return mode.run(WithDefaults(name, std::move(options)));
  }
  std::fprintf(stderr, "attnd_bench: there is no mode '%s'\n", std::string(name).c_str());
  PrintUsage(stderr);
  return 2;
}

}  // namespace attnd::bench

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.empty()) {
    attnd::bench::PrintUsage(stderr);
    return 2;
  }
  if (arguments[0] == "--help" || arguments[0] == "help") {
    attnd::bench::PrintUsage(stdout);
    return 0;
  }
  return attnd::bench::RunMode(arguments[0], {arguments.begin() + 1, arguments.end()});
}

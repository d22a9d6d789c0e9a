// The modes of attnd_bench: each prints its rows and returns the exit status: 0 when every row was measured.
#ifndef ATTND_TESTS_BENCH_MODES_H_
#define ATTND_TESTS_BENCH_MODES_H_

#include <vector>

#include "tests/bench/options.h"

namespace attnd::bench {

int RunDecode(const Options& options);
int RunFork(const Options& options);
int RunPrefill(const Options& options);
int RunBackward(const Options& options);
int RunAppend(const Options& options);
int RunStorage(const Options& options);
int RunScaling(const Options& options);
int RunSessions(const Options& options);
int RunRpc(const Options& options);    // only where gRPC is
int RunServe(const Options& options);  // likewise
int RunSuite(const Options& options);

struct Mode {
  const char* name;
  const char* help;
  int (*run)(const Options& options);
};
const std::vector<Mode>& Modes();

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_MODES_H_

// The modes of attnd_bench: each prints its rows and returns the exit status.
#ifndef ATTND_TESTS_BENCH_MODES_H_
#define ATTND_TESTS_BENCH_MODES_H_

#include "tests/bench/options.h"

namespace attnd::bench {

int RunDecode(const Options& options);
int RunPrefill(const Options& options);
int RunAppend(const Options& options);
int RunRpc(const Options& options);  // only where gRPC is

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_MODES_H_

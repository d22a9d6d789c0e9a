// Decode: the last token (with --queries the last few) of each sequence against a layer's whole context. And fork: the
// same where the sequences' block tables share a prefix, whose bytes need to be read only once.
#include "tests/bench/attend.h"
#include "tests/bench/modes.h"

namespace attnd::bench {

int RunDecode(const Options& options) { return RunAttend("decode", options, /*flops_per_second=*/false); }

int RunFork(const Options& options) { return RunAttend("fork", options, /*flops_per_second=*/false); }

}  // namespace attnd::bench

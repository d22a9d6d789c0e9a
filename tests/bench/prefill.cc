// Prefill: causal attention of all of a sequence's new tokens at once, after --history tokens that are there already.
#include "tests/bench/attend.h"
#include "tests/bench/modes.h"

namespace attnd::bench {

int RunPrefill(const Options& options) { return RunAttend("prefill", options, /*flops_per_second=*/true); }

}  // namespace attnd::bench

// Memory in transparent huge pages, where the kernel grants them: what attnd's own arena is made of.
#ifndef ATTND_TESTS_BENCH_HUGE_MEMORY_H_
#define ATTND_TESTS_BENCH_HUGE_MEMORY_H_

#include <cstddef>

namespace attnd::bench {

// At least `bytes`, aligned to 2 MiB, touched. It is the process's only such piece and kept from row to row (touching
// 1.5 GiB takes longer than many a row): a call ends the use of what an earlier one returned. Ends the program, saying
// why, when there is no memory.
std::byte* HugeMemory(size_t bytes);

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_HUGE_MEMORY_H_

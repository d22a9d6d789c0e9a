// The roof of what reads memory: the plainest reading of the same bytes.
#ifndef ATTND_TESTS_BENCH_READ_STREAM_H_
#define ATTND_TESTS_BENCH_READ_STREAM_H_

#include <cstddef>
#include <cstdint>

#include "tests/bench/pool.h"

namespace attnd::bench {

// Reads bytes [0, bytes), but for a rest of less than 256, from `data`, aligned to 64; returns a sum so that nobody
// drops the loop.
uint64_t ReadWords(const std::byte* data, size_t bytes);

// The same by all threads of the pool, a part at a time.
void ReadStream(Pool* pool, const std::byte* data, size_t bytes);

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_READ_STREAM_H_

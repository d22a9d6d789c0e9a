#include "server/cache/checksum.h"

#if ATTND_XXHASH_DISPATCHES
#include <xxh_x86dispatch.h>  // makes xxhash.h's names those that choose by the CPU
#else
#include <xxhash.h>
#endif

namespace attnd {
namespace {

// The library finds out what the CPU has at the first call, without a lock.
void Initialize() {
  static const uint64_t first = XXH3_64bits("", 0);
  (void)first;
}

}  // namespace

uint64_t Checksum(const void* data, size_t bytes, uint64_t seed) {
  Initialize();
  return XXH3_64bits_withSeed(data, bytes, seed);
}

ChecksumStream::ChecksumStream() : state_(XXH3_createState()) { Initialize(); }
void ChecksumStream::Start(uint64_t seed) { XXH3_64bits_reset_withSeed(state_.get(), seed); }
void ChecksumStream::Add(const void* data, size_t bytes) { XXH3_64bits_update(state_.get(), data, bytes); }
uint64_t ChecksumStream::Result() const { return XXH3_64bits_digest(state_.get()); }
void ChecksumStream::Delete::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

}  // namespace attnd

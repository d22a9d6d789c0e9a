// A cache whose blocks hold a number per token, so that a test can tell what is where.
#ifndef ATTND_TESTS_UNIT_CACHE_CACHE_HARNESS_H_
#define ATTND_TESTS_UNIT_CACHE_CACHE_HARNESS_H_

#include <gtest/gtest.h>

#include <cstring>
#include <memory>

#include "kernels/block_layout.h"
#include "server/cache/session_cache.h"

namespace attnd {

// The test's own block: a number per slot.
inline constexpr size_t kBlockBytes = kBlockTokens * sizeof(int64_t);

inline std::unique_ptr<BlockPool> MakePool(int64_t blocks) {
  auto pool = BlockPool::Create({blocks * static_cast<int64_t>(kBlockBytes), true});
  EXPECT_TRUE(pool.ok());
  return *std::move(pool);
}

inline int64_t* Slots(const SessionCache& cache, BlockId id) { return reinterpret_cast<int64_t*>(cache.Address(id)); }

// Writes `stamp` + position to every staged token, as the engine's compute thread would write K and V.
inline void Write(const SessionCache& cache, const StagedAppend& staged, int heads, int64_t stamp) {
  for (int h = 0; h < heads; h++) {
    if (staged.copied_tokens > 0) {
      std::memcpy(Slots(cache, cache.block(staged, staged.first_fresh, h)),
                  Slots(cache, cache.block(staged.layer, staged.first_fresh, h)),
                  staged.copied_tokens * sizeof(int64_t));
    }
    for (int64_t p = staged.start; p < staged.length(); p++) {
      Slots(cache, cache.block(staged, p / kBlockTokens, h))[p % kBlockTokens] = stamp + p + h * 1000003;
    }
  }
}

inline int64_t Read(const SessionCache& cache, int layer, int64_t position, int head) {
  return Slots(cache, cache.block(layer, position / kBlockTokens, head))[position % kBlockTokens];
}

inline void Append(SessionCache* cache, int layer, int64_t start, int64_t tokens, int heads, int64_t stamp) {
  StagedAppend staged;
  ASSERT_TRUE(cache->Stage(layer, start, tokens, &staged));
  Write(*cache, staged, heads, stamp);
  cache->Commit(&staged);
}

}  // namespace attnd

#endif  // ATTND_TESTS_UNIT_CACHE_CACHE_HARNESS_H_

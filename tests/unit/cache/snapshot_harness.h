// Sessions with real blocks for the tests of snapshots, and snapshots of them as one string.
#ifndef ATTND_TESTS_UNIT_CACHE_SNAPSHOT_HARNESS_H_
#define ATTND_TESTS_UNIT_CACHE_SNAPSHOT_HARNESS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/block_layout.h"
#include "server/cache/block_pool.h"
#include "server/cache/session_cache.h"
#include "server/cache/snapshot.h"

namespace attnd {

// A session with a pool of its own, whose blocks are NaN where nothing was written.
class TestSession {
 public:
  TestSession(const KvShape& shape, int num_kv_heads, int num_layers, int64_t capacity_bytes = int64_t{64} << 20);
  ~TestSession();

  // Random tokens, written as the engine writes them.
  void Append(int layer, int64_t tokens, std::mt19937_64* random);
  std::string Snapshot(const std::string& metadata = "") const;
  SnapshotLayout Layout() const { return LayoutOf(cache, layout.shape, num_kv_heads); }
  std::byte* Block(int layer, int64_t index, int head) { return cache.Address(cache.block(layer, index, head)); }

  const BlockLayout layout;
  const int num_kv_heads;
  const std::unique_ptr<BlockPool> pool;
  SessionCache cache;
};

struct TestSpec {
  KvShape shape;
  int num_kv_heads = 1;
  std::vector<int64_t> lengths;       // of each layer
  std::vector<int64_t> first_tokens;  // empty: nothing was freed
};
std::unique_ptr<TestSession> MakeSession(const TestSpec& spec, uint64_t seed);

// What came out of reading bytes in pieces of `piece_bytes`: a session of a pool of its own, whole or not.
struct Restored {
  absl::Status status;
  SnapshotHeader header;
  std::unique_ptr<TestSession> session;  // null: the header was not accepted
};
Restored Restore(absl::string_view bytes, size_t piece_bytes);

// Fails unless both hold the same tokens, and the slots behind them are as InitBlock leaves them in `restored`.
void ExpectEqualSessions(TestSession* original, TestSession* restored);

// The snapshot with right checksums, for tests that have changed something in it. It must have all its frames.
std::string WithRightChecksums(std::string snapshot, size_t block_bytes);

}  // namespace attnd

#endif  // ATTND_TESTS_UNIT_CACHE_SNAPSHOT_HARNESS_H_

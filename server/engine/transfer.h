// Memory for a session that comes from a snapshot, all of it at once.
#ifndef ATTND_SERVER_ENGINE_TRANSFER_H_
#define ATTND_SERVER_ENGINE_TRANSFER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "server/cache/block_pool.h"
#include "server/cache/snapshot.h"
#include "server/engine/session.h"

namespace attnd {

// Block tables may always have so many entries, and one for so many bytes of the cache's capacity: as many as there are
// blocks when all are of the smallest size.
inline constexpr int64_t kMinTableEntries = int64_t{1} << 18;
inline constexpr int64_t kCacheBytesPerTableEntry = 256;

// Bytes of the blocks that the session needs, its reservation included.
int64_t BytesToAllocate(const SnapshotLayout& layout, const Session& session);

// Takes the memory for layers of `layout`, and what the session's configuration reserves. All or nothing.
// RESOURCE_EXHAUSTED: TOO_MANY_TOKENS when they can never fit, CACHE_FULL with a delay when they do not fit now: it may
// be tried again, and otherwise the cache must be released. REQUIRES: the engine's mutex is held; ReadSnapshotHeader
// took the layout; the session is new.
absl::Status AllocateSession(const SnapshotLayout& layout, BlockPool* pool, Session* session);

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_TRANSFER_H_

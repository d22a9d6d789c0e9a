// A session's way into a store of snapshots and out of it: what the engine's threads do without its mutex.
#ifndef ATTND_SERVER_ENGINE_STORED_SESSION_H_
#define ATTND_SERVER_ENGINE_STORED_SESSION_H_

#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kernels/block_layout.h"
#include "server/cache/session_cache.h"
#include "server/cache/snapshot.h"
#include "server/cache/snapshot_store.h"
#include "server/engine/session.h"

namespace attnd {

// A private copy of a session's block tables, and what is to be written before its blocks.
struct SnapshotSource {
  std::unique_ptr<SessionCache> cache;  // to be released under the engine's mutex
  SnapshotHeader header;
};

// REQUIRES: the engine's mutex is held, the session is in memory.
SnapshotSource PinSession(const Session& session, BlockPool* pool);

// Reads the file into the cache, whose layers have been allocated. The store's error, INVALID_ARGUMENT for a file that
// is damaged, or CANCELLED once `stop` says so.
absl::Status ReadSession(const SnapshotStore& store, const std::string& name, SessionCache* cache,
                         const BlockLayout& layout, absl::FunctionRef<bool()> stop);

// The file's header alone, if the file is as long as it says.
absl::StatusOr<SnapshotHeader> ReadHeader(const SnapshotStore& store, const std::string& name);

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_STORED_SESSION_H_

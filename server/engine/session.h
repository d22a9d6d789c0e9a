// A session as the engine keeps it.
#ifndef ATTND_SERVER_ENGINE_SESSION_H_
#define ATTND_SERVER_ENGINE_SESSION_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "kernels/block_layout.h"
#include "server/cache/session_cache.h"
#include "server/engine/engine.h"
#include "server/engine/session_id.h"

namespace attnd {

class SnapshotStore;

// Why a session is gone; kNone while it is open.
enum class GoneReason : uint8_t { kNone, kClosed, kExpired, kEvicted, kLost };

// What sessions of equal configuration share.
struct SessionModel {
  SessionConfig config;
  BlockLayout layout;
  explicit SessionModel(SessionConfig c) : config(std::move(c)), layout(config.shape) {}
};

// A session on disk: its snapshot in a store, under its id, and what is told of it meanwhile.
struct StoredSession {
  SnapshotStore* store = nullptr;
  int64_t bytes = 0;  // of the file
  std::vector<int64_t> lengths, first_tokens;
};

// Guarded by the engine's mutex, but for `model` and the id, which never change, and for the cache's tables while a
// step runs (session_cache.h). Kept alive by the table and by every queued step.
struct Session {
  Session(SessionId session_id, uint64_t session_sequence, std::shared_ptr<const SessionModel> session_model,
          BlockPool* pool)
      : id(session_id),
        sequence(session_sequence),
        model(std::move(session_model)),
        cache(pool, model->layout.block_bytes, model->config.num_layers, model->config.heads.num_kv_heads) {}

  const SessionId id;
  // Creation order; its lane in the scheduler. An imported session has none before it is in the table.
  uint64_t sequence;
  const std::shared_ptr<const SessionModel> model;
  SessionCache cache;

  GoneReason gone = GoneReason::kNone;
  int pending = 0;       // jobs that are queued or running
  bool running = false;  // one of them has started: its blocks are being read
  absl::Time create_time;
  absl::Time idle_since;                       // end of the last job
  absl::Time expiry = absl::InfiniteFuture();  // its entry in the table's order of expiry; infinite: none

  std::unique_ptr<StoredSession> stored;  // null: in memory
  bool restoring = false;                 // it is on its way back, because jobs wait for it
  // It is on its way to disk, unless a job comes for it; once `stored` is set too, its blocks are there until the file
  // has its name.
  bool spilling = false;
  // Neighbours in the table's order of last use; in it while `in_recency`.
  Session *older = nullptr, *newer = nullptr;
  bool in_recency = false;
};

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_SESSION_H_

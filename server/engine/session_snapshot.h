// What the engine says of a session inside a snapshot, beside its blocks: its configuration and, where it is to come
// back as itself and not as a new one, who it is. Written by hand, versioned and little endian: the engine knows no
// protobuf. Stateless and thread-safe.
#ifndef ATTND_SERVER_ENGINE_SESSION_SNAPSHOT_H_
#define ATTND_SERVER_ENGINE_SESSION_SNAPSHOT_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/cache/snapshot.h"
#include "server/engine/engine.h"
#include "server/engine/session.h"
#include "server/engine/session_id.h"

namespace attnd {

struct SessionRecord {
  // Of a session that comes back as itself: from spilling, or in a server's next life.
  struct Identity {
    SessionId id;
    absl::Time create_time;  // to the nanosecond, between 1677 and 2262; what is outside becomes the nearest end
    absl::Time idle_since;
    uint64_t sequence = 0;  // creation order
  };
  SessionConfig config;  // ttl to the nanosecond
  // None in what a client exports: an import makes a new session, and a file that is handed on names no session that
  // still lives. So the exports of a session that nobody stepped in between are equal, byte for byte.
  std::optional<Identity> identity;
};

// REQUIRES: ValidateConfig(record.config) is OK.
std::string EncodeSessionRecord(const SessionRecord& record);

// INVALID_ARGUMENT (BAD_SNAPSHOT): another version, bytes that end early or do not end, numbers that are no
// configuration. Allocates no more than the bytes that are there.
absl::StatusOr<SessionRecord> DecodeSessionRecord(absl::string_view bytes);

// The engine's mutex must be held: of a session, or of a cache that shares a session's blocks.
SessionRecord::Identity IdentityOf(const Session& session);
SnapshotLayout LayoutOf(const SessionCache& cache, const SessionModel& model);

SnapshotHeader MakeSnapshotHeader(SnapshotLayout layout, const SessionRecord& record);

// The record of a header that came from outside. INVALID_ARGUMENT (BAD_SNAPSHOT) when it cannot be read, or when the
// header's layers are none that its configuration allows: every other layer is safe to be stepped.
absl::StatusOr<SessionRecord> ReadSnapshotHeader(const SnapshotHeader& header);

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_SESSION_SNAPSHOT_H_

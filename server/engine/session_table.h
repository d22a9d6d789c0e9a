// The open sessions, by id, by age, by when they were last used and by when they expire; and, for a while, why others
// are gone.
//
// Not thread-safe: the engine's mutex guards it.
#ifndef ATTND_SERVER_ENGINE_SESSION_TABLE_H_
#define ATTND_SERVER_ENGINE_SESSION_TABLE_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/engine/session.h"

namespace attnd {

class SessionTable {
 public:
  // The reason is remembered for this many of the sessions that went last; older ids are NEVER_EXISTED.
  static constexpr size_t kRememberedIds = 65536;

  using SessionPtr = std::shared_ptr<Session>;

  void Insert(SessionPtr session, absl::Time now);
  // NOT_FOUND with the reason.
  absl::StatusOr<SessionPtr> Find(SessionId id) const;
  GoneReason WhyGone(SessionId id) const;  // kNone: open, or never existed (or too long ago)
  void Remove(const SessionPtr& session, GoneReason reason);

  // Sessions with sequence > after, in order, at most `limit`.
  std::vector<SessionPtr> List(uint64_t after, int limit) const;
  int64_t size() const { return static_cast<int64_t>(by_id_.size()); }

  // The idle clock starts again. Call when a session's last pending job has ended.
  void Touch(Session* session, absl::Time now);
  // Removes and returns the sessions that have expired, at most `limit`. A session with pending jobs is passed over
  // until Touch.
  std::vector<SessionPtr> TakeExpired(absl::Time now, int limit);
  // When to call TakeExpired next. A session that was touched meanwhile makes that call find nothing, no harm.
  absl::Time next_expiry() const;

  // Order of last use of the sessions that hold memory (`stored` is null), the one that was idle longest first. Those
  // with pending jobs are among them, at the place of their last Touch.
  Session* oldest() const { return oldest_; }
  SessionPtr Shared(const Session& session) const { return by_id_.find(session.id)->second; }
  // Call when a session has been stored, and when it has come back.
  void UpdateRecency(Session* session);

  // An id of an earlier process that is gone.
  void RememberGone(SessionId id, GoneReason reason);

  static absl::Status GoneError(SessionId id, GoneReason reason);

 private:
  void SetExpiry(Session* session, absl::Time expiry);
  void LeaveRecency(Session* session);

  absl::flat_hash_map<SessionId, SessionPtr> by_id_;
  absl::btree_map<uint64_t, Session*> by_sequence_;
  // Times may lie before a session's true expiry, which moves with every step: corrected when they come up.
  absl::btree_set<std::pair<absl::Time, uint64_t>> by_expiry_;

  Session *oldest_ = nullptr, *newest_ = nullptr;

  absl::flat_hash_map<SessionId, GoneReason> gone_;
  std::vector<SessionId> gone_ring_;  // in the order they went, from gone_next_ once it is full
  size_t gone_next_ = 0;
};

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_SESSION_TABLE_H_

#include "server/engine/session_table.h"

#include <cassert>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace attnd {

void SessionTable::Insert(SessionPtr session, absl::Time now) {
  Session* const raw = session.get();
  by_sequence_.emplace(raw->sequence, raw);
  const bool is_new = by_id_.emplace(raw->id, std::move(session)).second;
  assert(is_new);
  (void)is_new;
  Touch(raw, now);
}

absl::StatusOr<SessionTable::SessionPtr> SessionTable::Find(SessionId id) const {
  const auto it = by_id_.find(id);
  if (it != by_id_.end()) return it->second;
  return GoneError(id, WhyGone(id));
}

GoneReason SessionTable::WhyGone(SessionId id) const {
  const auto it = gone_.find(id);
  return it == gone_.end() ? GoneReason::kNone : it->second;
}

absl::Status SessionTable::GoneError(SessionId id, GoneReason reason) {
  absl::string_view word = "NEVER_EXISTED", what = "never existed";
  switch (reason) {
    case GoneReason::kNone:
      break;
    case GoneReason::kClosed:
      word = "CLOSED", what = "was closed";
      break;
    case GoneReason::kExpired:
      word = "EXPIRED", what = "expired: it was idle for longer than its time to live";
      break;
    case GoneReason::kEvicted:
      word = "EVICTED", what = "was evicted to make room";
      break;
    case GoneReason::kLost:
      return MakeError(absl::StatusCode::kDataLoss, "SPILL_DAMAGED",
                       absl::StrCat("session ", FormatSessionId(id), " was on disk, and its file is damaged or gone"));
  }
  return MakeError(absl::StatusCode::kNotFound, word, absl::StrCat("session ", FormatSessionId(id), " ", what));
}

void SessionTable::Remove(const SessionPtr& session, GoneReason reason) {
  assert(session->gone == GoneReason::kNone && reason != GoneReason::kNone);
  const SessionPtr keep = session;  // the argument may be the table's own
  keep->gone = reason;
  SetExpiry(keep.get(), absl::InfiniteFuture());
  LeaveRecency(keep.get());
  by_sequence_.erase(keep->sequence);
  by_id_.erase(keep->id);
  RememberGone(keep->id, reason);
}

void SessionTable::RememberGone(SessionId id, GoneReason reason) {
  if (gone_ring_.size() < kRememberedIds) {
    gone_ring_.push_back(id);
  } else {
    gone_.erase(gone_ring_[gone_next_]);
    gone_ring_[gone_next_] = id;
    gone_next_ = (gone_next_ + 1) % kRememberedIds;
  }
  gone_[id] = reason;
}

void SessionTable::UpdateRecency(Session* session) {
  LeaveRecency(session);
  if (session->stored != nullptr) return;
  session->older = newest_;
  (newest_ == nullptr ? oldest_ : newest_->newer) = session;
  newest_ = session;
  session->in_recency = true;
}

void SessionTable::LeaveRecency(Session* session) {
  if (!session->in_recency) return;
  (session->older == nullptr ? oldest_ : session->older->newer) = session->newer;
  (session->newer == nullptr ? newest_ : session->newer->older) = session->older;
  session->older = session->newer = nullptr;
  session->in_recency = false;
}

std::vector<SessionTable::SessionPtr> SessionTable::List(uint64_t after, int limit) const {
  std::vector<SessionPtr> out;
  for (auto it = by_sequence_.upper_bound(after); it != by_sequence_.end(); ++it) {
    if (static_cast<int>(out.size()) >= limit) break;
    out.push_back(by_id_.find(it->second->id)->second);
  }
  return out;
}

void SessionTable::Touch(Session* session, absl::Time now) {
  session->idle_since = now;
  UpdateRecency(session);
  // An entry that is there is early, never late: it is corrected when its time comes, not at every step.
  if (session->expiry == absl::InfiniteFuture()) SetExpiry(session, now + session->model->config.ttl);
}

std::vector<SessionTable::SessionPtr> SessionTable::TakeExpired(absl::Time now, int limit) {
  std::vector<SessionPtr> out;
  while (!by_expiry_.empty() && by_expiry_.begin()->first <= now && static_cast<int>(out.size()) < limit) {
    Session* const session = by_sequence_.find(by_expiry_.begin()->second)->second;
    SetExpiry(session, absl::InfiniteFuture());
    if (session->pending > 0) continue;  // comes back with Touch
    const absl::Time expiry = session->idle_since + session->model->config.ttl;
    if (expiry > now) {
      SetExpiry(session, expiry);
      continue;
    }
    out.push_back(by_id_.find(session->id)->second);
    Remove(out.back(), GoneReason::kExpired);
  }
  return out;
}

absl::Time SessionTable::next_expiry() const {
  return by_expiry_.empty() ? absl::InfiniteFuture() : by_expiry_.begin()->first;
}

void SessionTable::SetExpiry(Session* session, absl::Time expiry) {
  if (session->expiry != absl::InfiniteFuture()) by_expiry_.erase({session->expiry, session->sequence});
  session->expiry = expiry;
  if (expiry != absl::InfiniteFuture()) by_expiry_.insert({expiry, session->sequence});
}

}  // namespace attnd

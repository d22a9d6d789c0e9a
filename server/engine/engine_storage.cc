// Sessions on disk: idle ones that are written there while memory is short, and those that come back because jobs wait
// for them. Files are written, read and removed without the mutex.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/attention.h"
#include "server/cache/snapshot.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"
#include "server/engine/stored_session.h"

namespace attnd {
namespace {

constexpr absl::Duration kCacheRetryDelay = absl::Milliseconds(500);

using SnapshotOp = EngineObserver::SnapshotOp;

int64_t BlockBytes(const Session& session, const std::vector<int64_t>& lengths, const std::vector<int64_t>& first) {
  int64_t blocks = 0;
  for (size_t i = 0; i < lengths.size(); i++) {
    blocks += session.cache.BlocksFor(lengths[i]) - session.cache.BlocksFor(first[i]);
  }
  return blocks * static_cast<int64_t>(session.cache.block_bytes());
}

absl::Status DrainingError() {
  return MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the server is shutting down");
}

absl::Status DamagedError(const Session& session, const absl::Status& why) {
  return MakeError(absl::StatusCode::kDataLoss, "SPILL_DAMAGED",
                   absl::StrCat("session ", FormatSessionId(session.id), " was on disk and is lost: ", why.message()));
}

}  // namespace

void EngineImpl::Store(Session* session, StoredSession stored) {
  stat_sessions_spilled_++;
  stat_spilled_bytes_ += stored.bytes;
  session->stored = std::make_unique<StoredSession>(std::move(stored));
}

std::unique_ptr<StoredSession> EngineImpl::Unstore(Session* session) {
  if (session->stored != nullptr) {
    stat_sessions_spilled_--;
    stat_spilled_bytes_ -= session->stored->bytes;
  }
  return std::move(session->stored);
}

void EngineImpl::RemoveStored(const Session& session, std::unique_ptr<StoredSession> stored) {
  // A file that stays only takes place: its session is gone.
  if (stored != nullptr) (void)stored->store->Remove(FormatSessionId(session.id));
}

void EngineImpl::AwaitRestore(const SessionPtr& session, Job* job) {
  job->awaited++;
  restore_waiters_[session->sequence].push_back(job->id);
  if (session->restoring) return;
  session->restoring = true;
  restoring_++;
  restore_queue_.push_back(session);
  restore_cv_.Signal();
}

void EngineImpl::RestoreLoop() {
  for (;;) {
    SessionPtr session;
    {
      absl::MutexLock lock(&mutex_);
      while (!stopping_ && restore_queue_.empty()) restore_cv_.Wait(&mutex_);
      if (stopping_) return;
      session = std::move(restore_queue_.front());
      restore_queue_.pop_front();
    }
    EndRestore(session, Restore(session));
  }
}

absl::Status EngineImpl::TakeMemoryToRestore(Session* session, bool* here) {
  absl::MutexLock lock(&mutex_);
  while (session->spilling && !stop_restores_) room_cv_.Wait(&mutex_);
  *here = session->gone == GoneReason::kNone && session->stored == nullptr;
  if (*here) return absl::OkStatus();
  for (;;) {
    if (stop_restores_) return DrainingError();
    if (session->gone != GoneReason::kNone) return SessionTable::GoneError(session->id, session->gone);
    const StoredSession& stored = *session->stored;
    if (session->cache.reserved_bytes() > 0 || session->cache.Reserve(session->model->config.reserve_tokens)) {
      if (session->cache.AllocateLayers(stored.lengths, stored.first_tokens)) {
        session->running = true;  // whoever closes it meanwhile leaves the blocks to EndRestore
        return absl::OkStatus();
      }
    }
    const SessionCache& cache = session->cache;  // holds its reservation, or nothing
    const int64_t reserve = cache.BlocksFor(session->model->config.reserve_tokens) * cache.num_layers() *
                            static_cast<int64_t>(cache.block_bytes());
    const int64_t total = std::max(reserve, BlockBytes(*session, stored.lengths, stored.first_tokens));
    if (total > pool_->capacity_bytes()) {  // saved by a process with a larger cache
      return MakeError(absl::StatusCode::kResourceExhausted, "TOO_MANY_TOKENS",
                       absl::StrCat("session ", FormatSessionId(session->id), " is on disk and needs ", total,
                                    " bytes of cache, which has ", pool_->capacity_bytes()),
                       {{"requested", absl::StrCat(total)}, {"limit", absl::StrCat(pool_->capacity_bytes())}});
    }
    const int64_t bytes = total - cache.reserved_bytes();
    const int64_t ended = spills_ended_;
    switch (MakeRoom(bytes)) {
      case Room::kMade:
        continue;
      case Room::kComing:
        while (!stop_restores_ && spills_ended_ == ended) room_cv_.Wait(&mutex_);
        continue;
      case Room::kNone:
        return MakeError(
            absl::StatusCode::kResourceExhausted, "CACHE_FULL",
            absl::StrCat("session ", FormatSessionId(session->id), " is on disk and needs ", bytes,
                         " bytes of cache to come back, ", pool_->available_bytes(), " are available", WhyNotSpilled()),
            {{"needed_bytes", absl::StrCat(bytes)}, {"available_bytes", absl::StrCat(pool_->available_bytes())}},
            kCacheRetryDelay);
    }
  }
}

absl::Status EngineImpl::Restore(const SessionPtr& session) {
  const absl::Time begin = absl::Now();
  bool here = false;
  absl::Status status = TakeMemoryToRestore(session.get(), &here);
  if (!status.ok() || here) return status;
  SnapshotStore* store;
  int64_t bytes;
  {
    absl::MutexLock lock(&mutex_);
    if (session->stored == nullptr) return SessionTable::GoneError(session->id, session->gone);
    store = session->stored->store;
    bytes = session->stored->bytes;
  }
  PrepareKernels(session->model->config.shape);
  const std::string name = FormatSessionId(session->id);
  status = ReadSession(*store, name, &session->cache, session->model->layout, [this] { return stop_restores_.load(); });
  if (stop_restores_) return DrainingError();  // it stays on disk
  if (!status.ok()) {
    {
      absl::MutexLock lock(&mutex_);  // whoever closed it meanwhile took its file
      if (session->gone != GoneReason::kNone) return SessionTable::GoneError(session->id, session->gone);
    }
    observer_->OnSnapshotFailed(SnapshotOp::kRestore);
    if (!absl::IsInvalidArgument(status) && !absl::IsNotFound(status)) {  // the disk's trouble, and perhaps it passes
      return MakeError(absl::StatusCode::kResourceExhausted, "CACHE_FULL",
                       absl::StrCat("session ", name, " is on disk and cannot be read now: ", status.message()), {},
                       kCacheRetryDelay);
    }
    (void)store->Remove(name);  // of no use to anyone
    return DamagedError(*session, status);
  }
  // Before any step is answered: a file that stayed would bring back what the session was, should the process die.
  status = store->Remove(name);
  // Only a flush may have failed: then the file is gone, and what was read of it is all there is.
  if (!status.ok() && !absl::IsNotFound(status) && !absl::IsNotFound(store->Read(name).status())) {
    observer_->OnSnapshotFailed(SnapshotOp::kRestore);
    return MakeError(absl::StatusCode::kResourceExhausted, "CACHE_FULL",
                     absl::StrCat("session ", name, " is on disk and cannot come back now: ", status.message()), {},
                     kCacheRetryDelay);
  }
  observer_->OnSnapshot(SnapshotOp::kRestore, bytes, absl::Now() - begin);
  return absl::OkStatus();
}

void EngineImpl::EndRestore(const SessionPtr& session, const absl::Status& status) {
  std::unique_ptr<SessionCache> discarded;
  if (!status.ok()) {  // its memory is free when its waiters are told
    {
      absl::MutexLock lock(&mutex_);
      discarded = session->cache.Detach();
    }
    ReleaseCache(discarded.get());
    discarded.reset();
  }
  {
    absl::MutexLock lock(&mutex_);
    session->restoring = session->running = false;
    restoring_--;
    if (status.ok() && session->gone == GoneReason::kNone) {
      Unstore(session.get());
      sessions_.UpdateRecency(session.get());
    } else {
      discarded = session->cache.Detach();
      if (absl::IsDataLoss(status) && session->gone == GoneReason::kNone) {
        Unstore(session.get());
        sessions_.Remove(session, GoneReason::kLost);
        stat_sessions_ = sessions_.size();
        observer_->OnSessionClosed("lost");
      }
    }
    const auto waiters = restore_waiters_.find(session->sequence);
    std::vector<uint64_t> job_ids;
    if (waiters != restore_waiters_.end()) {
      job_ids = std::move(waiters->second);
      restore_waiters_.erase(waiters);
    }
    for (const uint64_t job_id : job_ids) {
      const auto job = jobs_.find(job_id);
      if (job == jobs_.end()) continue;
      for (SegmentRun& run : job->second->runs) {
        if (run.session == session) run.status.Update(status);
      }
      EndWait(job_id);
    }
  }
  if (discarded != nullptr) ReleaseCache(discarded.get());
}

void EngineImpl::SpillLoop() {
  for (;;) {
    QueuedSpill next;
    {
      absl::MutexLock lock(&mutex_);
      while (!stopping_ && spill_queue_.empty()) spill_cv_.Wait(&mutex_);
      if (stopping_) return;
      next = std::move(spill_queue_.front());
      spill_queue_.pop_front();
    }
    Spill(next.session);
    absl::MutexLock lock(&mutex_);
    spilling_bytes_ -= next.bytes;
    TellRoomMade();
  }
}

void EngineImpl::Spill(const SessionPtr& session) {
  const absl::Time begin = absl::Now();
  SnapshotSource source;
  absl::Time idle_since;
  {
    absl::MutexLock lock(&mutex_);
    if (session->gone != GoneReason::kNone || session->pending > 0 || begin < spill_again_ || draining_) {
      session->spilling = false;
      return;
    }
    idle_since = session->idle_since;
    source = PinSession(*session, pool_.get());
  }
  const SnapshotLayout layout = source.header.layout;
  absl::StatusOr<int64_t> bytes;
  std::optional<bool> wanted;
  {
    SnapshotWriter writer(*source.cache, session->model->layout, std::move(source.header));
    bytes = spill_store_->Write(
        FormatSessionId(session->id), &writer, [this] { return stop_spills_.load(); },
        [&] {
          wanted = CommitSpill(session.get(), idle_since, layout, writer.total_bytes());
          return *wanted;
        });
  }
  ReleaseCache(source.cache.get());
  EndSpill(session, bytes.status(), wanted);
  if (wanted == false) return;
  if (!bytes.ok()) return observer_->OnSnapshotFailed(SnapshotOp::kSpill);
  observer_->OnSnapshot(SnapshotOp::kSpill, *bytes, absl::Now() - begin);
  observer_->OnEvicted(EngineObserver::Eviction::kSpilled);
}

// Only now, and not once the file is there: a file of a session that goes on in memory, were the process killed before
// it is removed, would bring back what the session was.
bool EngineImpl::CommitSpill(Session* session, absl::Time idle_since, const SnapshotLayout& layout, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  if (session->gone != GoneReason::kNone || session->pending > 0 || session->idle_since != idle_since) return false;
  Store(session, {spill_store_, bytes, layout.lengths, layout.first_tokens});
  return true;
}

void EngineImpl::EndSpill(const SessionPtr& session, const absl::Status& status, std::optional<bool> wanted) {
  std::unique_ptr<SessionCache> freed;
  bool gone;
  {
    absl::MutexLock lock(&mutex_);
    session->spilling = false;
    gone = session->gone != GoneReason::kNone;
    if (status.ok()) {
      spill_error_.clear();
      if (!gone) freed = session->cache.Detach();
    } else if (wanted != false) {
      spill_error_ = std::string(status.message());
      spill_again_ = absl::Now() + options_.spill_retry_delay;
      if (wanted == true) Unstore(session.get());
    }
    if (!gone && status.ok()) sessions_.UpdateRecency(session.get());
    room_cv_.SignalAll();  // for the restorer, if a job has come for it
  }
  if (freed != nullptr) ReleaseCache(freed.get());
  // Whoever closed it may have come before the file.
  if (gone && status.ok()) (void)spill_store_->Remove(FormatSessionId(session->id));
}

}  // namespace attnd

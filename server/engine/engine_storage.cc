// Sessions on disk: idle ones that are written there while memory is short, those that come back because jobs wait for
// them, and those of an earlier process. The disk is never touched with the mutex held.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/attention.h"
#include "server/cache/snapshot.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"
#include "server/engine/session_snapshot.h"

namespace attnd {
namespace {

constexpr int kSaveSessions = 64;
constexpr absl::Duration kCacheRetryDelay = absl::Milliseconds(500);

using SnapshotOp = EngineObserver::SnapshotOp;

int64_t BlockBytes(const Session& session, const std::vector<int64_t>& lengths, const std::vector<int64_t>& first) {
  int64_t blocks = 0;
  for (size_t i = 0; i < lengths.size(); i++) {
    blocks += session.cache.BlocksFor(lengths[i]) - session.cache.BlocksFor(first[i]);
  }
  return blocks * static_cast<int64_t>(session.cache.block_bytes());
}

// A private copy of a session's block tables, and what is to be written before its blocks.
struct SnapshotSource {
  std::unique_ptr<SessionCache> cache;
  SnapshotHeader header;
};

SnapshotSource Pin(const Session& session, BlockPool* pool) {
  const SessionConfig& config = session.model->config;
  SnapshotSource source;
  source.cache =
      std::make_unique<SessionCache>(pool, session.cache.block_bytes(), config.num_layers, config.heads.num_kv_heads);
  source.cache->Pin(session.cache);
  source.header = MakeSnapshotHeader(LayoutOf(session.cache, *session.model), {config, IdentityOf(session)});
  return source;
}

// Reads the file into the cache, or only as far as the header where `cache` is null.
absl::StatusOr<SnapshotHeader> ReadSnapshot(
    const SnapshotStore& store, const std::string& name, SessionCache* cache, const BlockLayout* layout,
    absl::FunctionRef<bool()> stop = [] { return false; }) {
  absl::StatusOr<std::unique_ptr<SnapshotStore::File>> file = store.Read(name);
  if (!file.ok()) return file.status();
  SnapshotReader reader;
  bool has_target = false;
  std::string piece;
  for (;;) {
    if (stop()) return absl::CancelledError("the server is shutting down");
    absl::Status status = (*file)->Next(&piece);
    if (status.ok() && !piece.empty()) status = reader.Write(piece);
    if (status.ok() && reader.header() != nullptr && !has_target) {
      if (cache == nullptr) {
        if (reader.total_bytes() == (*file)->bytes()) return *reader.header();
        return absl::InvalidArgumentError(
            absl::StrCat("the file has ", (*file)->bytes(), " bytes, its session needs ", reader.total_bytes()));
      }
      status = reader.SetTarget(cache, layout);
      has_target = true;
    }
    if (!status.ok()) return status;
    if (piece.empty()) break;
  }
  if (absl::Status status = reader.Finish(); !status.ok()) return status;
  return *reader.header();
}

absl::Status DamagedError(const Session& session, const absl::Status& why) {
  return MakeError(absl::StatusCode::kDataLoss, "SPILL_DAMAGED",
                   absl::StrCat("session ", FormatSessionId(session.id), " was on disk and is lost: ", why.message()));
}

std::string BootId() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
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
  while (session->spilling && !stopping_) room_cv_.Wait(&mutex_);
  *here = session->gone == GoneReason::kNone && session->stored == nullptr;
  if (*here) return absl::OkStatus();
  for (;;) {
    if (stopping_) return MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the server is shutting down");
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
        while (!stopping_ && spills_ended_ == ended) room_cv_.Wait(&mutex_);
        continue;
      case Room::kNone:
        return MakeError(
            absl::StatusCode::kResourceExhausted, "CACHE_FULL",
            absl::StrCat("session ", FormatSessionId(session->id), " is on disk and needs ", bytes,
                         " bytes of cache to come back, ", pool_->available_bytes(), " are available",
                         spill_error_.empty() ? "" : "; idle sessions cannot be moved to disk: ", spill_error_),
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
  const absl::StatusOr<SnapshotHeader> header =
      ReadSnapshot(*store, name, &session->cache, &session->model->layout, [this] { return stop_storage_.load(); });
  if (absl::IsCancelled(header.status())) return header.status();
  if (!header.ok()) {
    {
      absl::MutexLock lock(&mutex_);  // whoever closed it meanwhile took its file
      if (session->gone != GoneReason::kNone) return SessionTable::GoneError(session->id, session->gone);
    }
    observer_->OnSnapshotFailed(SnapshotOp::kRestore);
    if (absl::IsResourceExhausted(header.status())) {  // no descriptor or no memory to read it with: nothing is lost
      return MakeError(
          absl::StatusCode::kResourceExhausted, "CACHE_FULL",
          absl::StrCat("session ", name, " is on disk and cannot be read now: ", header.status().message()), {},
          kCacheRetryDelay);
    }
    (void)store->Remove(name);  // of no use to anyone
    return DamagedError(*session, header.status());
  }
  // Before any step is answered: a file that stayed would bring back what the session was, should the process die.
  status = store->Remove(name);
  // Only a flush may have failed: then the file is gone, and what was read of it is all there is.
  if (!status.ok() && !absl::IsNotFound(status) && !absl::IsNotFound(store->Read(name).status())) {
    observer_->OnSnapshotFailed(SnapshotOp::kRestore);
    return MakeError(absl::StatusCode::kInternal, "SPILL_DAMAGED",
                     absl::StrCat("the file of session ", name, " cannot be removed: ", status.message()));
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
    source = Pin(*session, pool_.get());
  }
  const SnapshotLayout layout = source.header.layout;
  absl::StatusOr<int64_t> bytes;
  {
    SnapshotWriter writer(*source.cache, session->model->layout, std::move(source.header));
    bytes = spill_store_->Write(
        FormatSessionId(session->id), &writer, [this] { return stop_storage_.load(); },
        [&] { return CommitSpill(session.get(), idle_since, layout, writer.total_bytes()); });
  }
  ReleaseCache(source.cache.get());
  EndSpill(session, bytes.status());
  if (absl::IsAborted(bytes.status())) return;
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

void EngineImpl::EndSpill(const SessionPtr& session, const absl::Status& status) {
  std::unique_ptr<SessionCache> freed;
  bool gone;
  {
    absl::MutexLock lock(&mutex_);
    session->spilling = false;
    gone = session->gone != GoneReason::kNone;
    if (status.ok()) {
      spill_error_.clear();
      if (!gone) freed = session->cache.Detach();
    } else if (!absl::IsAborted(status)) {
      spill_error_ = std::string(status.message());
      spill_again_ = absl::Now() + options_.spill_retry_delay;
      Unstore(session.get());
    }
    if (!gone && status.ok()) sessions_.UpdateRecency(session.get());
    room_cv_.SignalAll();  // for the restorer, if a job has come for it
  }
  if (freed != nullptr) ReleaseCache(freed.get());
  // Whoever closed it may have come before the file.
  if (gone && status.ok()) (void)spill_store_->Remove(FormatSessionId(session->id));
}

absl::StatusOr<SnapshotStore*> EngineImpl::OpenStore(const std::string& directory) {
  std::error_code error;
  const std::string path = std::filesystem::weakly_canonical(directory, error).string();
  absl::MutexLock lock(&mutex_);
  const auto it = stores_.find(path);
  if (it != stores_.end()) return it->second.get();
  // What is saved for a later process has to outlive the machine, what was spilled only the process.
  const bool sync = directory != options_.spill_dir;
  absl::StatusOr<std::unique_ptr<SnapshotStore>> store =
      SnapshotStore::Open(path, {.sync = sync, .fail_io = options_.fail_io});
  if (!store.ok()) return store.status();
  return stores_.emplace(path, *std::move(store)).first->second.get();
}

absl::Status EngineImpl::OpenSpillStore() {
  if (options_.spill_dir.empty()) return absl::OkStatus();
  absl::StatusOr<SnapshotStore*> store = OpenStore(options_.spill_dir);
  if (!store.ok()) return store.status();
  spill_store_ = *store;
  // Spilled files are not forced to the disk, nor is their removal: after a crash of the machine a file may be back
  // that was removed, older than what its session's client knows.
  const std::string boot_file = spill_store_->directory() + "/boot_id";
  std::string last_boot;
  std::ifstream(boot_file) >> last_boot;
  if (last_boot != BootId()) {
    const auto files = spill_store_->List();
    if (!files.ok()) return files.status();
    for (const SnapshotStore::Entry& file : *files) (void)spill_store_->Remove(file.name);
    std::ofstream(boot_file) << BootId() << "\n";
  }
  return absl::OkStatus();
}

absl::Status EngineImpl::AdoptFile(SnapshotStore* store, const SnapshotStore::Entry& file) {
  const std::string& name = file.name;
  const absl::StatusOr<SessionId> id = ParseSessionId(name);
  if (!id.ok()) return id.status();
  const absl::StatusOr<SnapshotHeader> header = ReadSnapshot(*store, name, nullptr, nullptr);
  absl::StatusOr<SessionRecord> record = header.ok() ? ReadSnapshotHeader(*header) : header.status();
  absl::Status status = record.status();
  if (status.ok() && (!record->identity.has_value() || !(record->identity->id == *id))) {
    status = absl::InvalidArgumentError("it is of another session");
  }
  absl::ReleasableMutexLock lock(&mutex_);
  if (const auto found = sessions_.Find(*id); found.ok()) {
    // A drain that was killed had written it while it was on its way to another directory: the two are the same now,
    // but once the session has been used, this one would be of its past.
    const bool same_file = (*found)->stored != nullptr && (*found)->stored->store == store;
    lock.Release();
    if (!same_file) (void)store->Remove(name);
    return absl::AlreadyExistsError(absl::StrCat("session ", name, " is here already"));
  }
  if (!status.ok()) {
    sessions_.RememberGone(*id, GoneReason::kLost);
    return absl::Status(status.code(), absl::StrCat(store->directory(), "/", name, ": ", status.message()));
  }
  auto session = std::make_shared<Session>(
      *id, next_sequence_++, std::make_shared<const SessionModel>(std::move(record->config)), pool_.get());
  session->create_time = record->identity->create_time;
  Store(session.get(), {store, file.bytes, header->layout.lengths, header->layout.first_tokens});
  sessions_.Insert(session, absl::Now());  // what it was idle while nobody served it does not count
  stat_sessions_ = sessions_.size();
  WakeReaper();
  return absl::OkStatus();
}

absl::StatusOr<SavedSessions> EngineImpl::RestoreSessions(const std::string& directory) {
  absl::StatusOr<SnapshotStore*> store = OpenStore(directory);
  if (!store.ok()) return store.status();
  const auto files = (*store)->List();
  if (!files.ok()) return files.status();
  SavedSessions result;
  for (const SnapshotStore::Entry& file : *files) {
    const absl::Status status = AdoptFile(*store, file);
    if (status.ok()) {
      result.saved++;
      observer_->OnSessionCreated(EngineObserver::Origin::kRestore);
    } else if (!absl::IsAlreadyExists(status)) {
      result.lost++;
      observer_->OnSnapshotFailed(SnapshotOp::kRestore);
      if (result.first_error.empty()) result.first_error = std::string(status.message());
    }
  }
  return result;
}

absl::StatusOr<int64_t> EngineImpl::SaveSession(const SessionPtr& session, SnapshotStore* store,
                                                absl::FunctionRef<bool()> stop) {
  const std::string name = FormatSessionId(session->id);
  SnapshotSource source;
  SnapshotStore* from = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    if (session->gone != GoneReason::kNone) return SessionTable::GoneError(session->id, session->gone);
    if (session->stored != nullptr) {
      from = session->stored->store;
    } else {
      source = Pin(*session, pool_.get());
    }
  }
  if (from == store) return 0;
  if (from != nullptr) {
    const absl::Status status = store->Adopt(from, name);
    if (!status.ok()) return status;
    absl::MutexLock lock(&mutex_);
    session->stored->store = store;
    return session->stored->bytes;
  }
  absl::StatusOr<int64_t> bytes;
  {
    SnapshotWriter writer(*source.cache, session->model->layout, std::move(source.header));
    bytes = store->Write(name, &writer, stop);
  }
  ReleaseCache(source.cache.get());
  return bytes;
}

absl::Status EngineImpl::PrepareToSave(const std::string& directory) { return OpenStore(directory).status(); }

absl::StatusOr<SavedSessions> EngineImpl::SaveSessions(const std::string& directory, absl::FunctionRef<bool()> stop) {
  absl::StatusOr<SnapshotStore*> store = OpenStore(directory);
  if (!store.ok()) return store.status();
  {
    absl::MutexLock lock(&mutex_);  // what is on its way to disk would be neither here nor there
    mutex_.Await(absl::Condition(+[](int64_t* bytes) { return *bytes == 0; }, &spilling_bytes_));
  }
  SavedSessions result;
  uint64_t after = 0;
  for (;;) {
    std::vector<SessionPtr> some;
    {
      absl::MutexLock lock(&mutex_);
      some = sessions_.List(after, kSaveSessions);
    }
    if (some.empty()) return result;
    for (const SessionPtr& session : some) {
      after = session->sequence;
      const absl::Time begin = absl::Now();
      const absl::StatusOr<int64_t> bytes =
          stop() ? absl::StatusOr<int64_t>(absl::CancelledError("there was no time left"))
                 : SaveSession(session, *store, stop);
      if (bytes.ok()) {
        result.saved++;
        observer_->OnSnapshot(SnapshotOp::kDrain, *bytes, absl::Now() - begin);
        continue;
      }
      if (absl::IsNotFound(bytes.status())) continue;  // closed or expired meanwhile
      result.lost++;
      observer_->OnSnapshotFailed(SnapshotOp::kDrain);
      if (result.first_error.empty()) result.first_error = std::string(bytes.status().message());
    }
  }
}

}  // namespace attnd

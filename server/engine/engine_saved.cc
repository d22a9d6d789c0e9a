// Sessions that outlive the process: saved when it ends, found and served by the next one.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"
#include "server/engine/session_snapshot.h"
#include "server/engine/stored_session.h"

namespace attnd {
namespace {

constexpr int kSaveSessions = 64;

using SnapshotOp = EngineObserver::SnapshotOp;

absl::Status SpillStoreError(const std::string& directory) {
  return absl::InvalidArgumentError(
      absl::StrCat(directory,
                   " is the directory that sessions are spilled to: what is there is not kept over a restart "
                   "of the machine"));
}

std::string BootId() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

}  // namespace

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

struct EngineImpl::FoundSession {
  SnapshotStore* store = nullptr;
  SnapshotStore::Entry file;
  SessionId id;
  absl::StatusOr<SessionRecord> record;
  SnapshotLayout layout;

  FoundSession(SnapshotStore* s, SnapshotStore::Entry f)
      : store(s), file(std::move(f)), id(*ParseSessionId(file.name)) {
    absl::StatusOr<SnapshotHeader> header = ReadHeader(*store, file.name);
    record = header.ok() ? ReadSnapshotHeader(*header) : header.status();
    if (!record.ok()) return;
    layout = std::move(header->layout);
    if (!record->identity.has_value() || !(record->identity->id == id)) {
      record = absl::InvalidArgumentError("it is of another session");
    }
  }
  uint64_t sequence() const { return record.ok() ? record->identity->sequence : 0; }
};

absl::Status EngineImpl::Adopt(FoundSession found) {
  absl::ReleasableMutexLock lock(&mutex_);
  if (const auto session = sessions_.Find(found.id); session.ok()) {
    // A drain that was killed had written it while it was on its way to another directory: the two are the same now,
    // but once the session has been used, this one would be of its past.
    const bool same_file = (*session)->stored != nullptr && (*session)->stored->store == found.store;
    lock.Release();
    if (!same_file) (void)found.store->Remove(found.file.name);
    return absl::AlreadyExistsError(absl::StrCat("session ", found.file.name, " is here already"));
  }
  if (!found.record.ok()) {
    sessions_.RememberGone(found.id, GoneReason::kLost);
    return absl::Status(found.record.status().code(), absl::StrCat(found.store->directory(), "/", found.file.name, ": ",
                                                                   found.record.status().message()));
  }
  auto session = std::make_shared<Session>(
      found.id, next_sequence_++, std::make_shared<const SessionModel>(std::move(found.record->config)), pool_.get());
  session->create_time = found.record->identity->create_time;
  Store(session.get(), {found.store, found.file.bytes, found.layout.lengths, found.layout.first_tokens});
  sessions_.Insert(session, absl::Now());  // what it was idle while nobody served it does not count
  stat_sessions_ = sessions_.size();
  WakeReaper();
  return absl::OkStatus();
}

absl::StatusOr<SavedSessions> EngineImpl::RestoreSessions(const std::string& directory) {
  absl::StatusOr<SnapshotStore*> store = OpenStore(directory);
  if (!store.ok()) return store.status();
  if (*store == spill_store_ && directory != options_.spill_dir) return SpillStoreError(directory);
  const auto files = (*store)->List();
  if (!files.ok()) return files.status();
  std::vector<FoundSession> found;
  for (const SnapshotStore::Entry& file : *files) found.emplace_back(*store, file);
  // The order of their creation is that of lists.
  std::sort(found.begin(), found.end(),
            [](const FoundSession& a, const FoundSession& b) { return a.sequence() < b.sequence(); });
  SavedSessions result;
  for (FoundSession& session : found) {
    const absl::Status status = Adopt(std::move(session));
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
      if (from == store) return 0;
    }
    if (stop()) return absl::CancelledError("there was no time left");
    if (from == nullptr) {
      source = PinSession(*session, pool_.get());
    }
  }
  if (from != nullptr) {
    const absl::Status status = store->Adopt(from, name);
    if (!status.ok()) return status;
    absl::MutexLock lock(&mutex_);
    if (session->stored == nullptr) return SessionTable::GoneError(session->id, session->gone);
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

absl::Status EngineImpl::PrepareToSave(const std::string& directory) {
  const absl::StatusOr<SnapshotStore*> store = OpenStore(directory);
  if (!store.ok()) return store.status();
  return *store == spill_store_ ? SpillStoreError(directory) : absl::OkStatus();
}

// What is on its way would be neither here nor there.
void EngineImpl::AwaitStorage() {
  stop_restores_ = true;
  absl::MutexLock lock(&mutex_);
  room_cv_.SignalAll();
  mutex_.Await(absl::Condition(
      +[](EngineImpl* engine)
           ABSL_NO_THREAD_SAFETY_ANALYSIS { return engine->spilling_bytes_ == 0 && engine->restoring_ == 0; },
      this));
}

absl::StatusOr<SavedSessions> EngineImpl::SaveSessions(const std::string& directory, absl::FunctionRef<bool()> stop) {
  if (absl::Status status = PrepareToSave(directory); !status.ok()) return status;
  absl::StatusOr<SnapshotStore*> store = OpenStore(directory);
  if (!store.ok()) return store.status();
  AwaitStorage();
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
      const absl::StatusOr<int64_t> bytes = SaveSession(session, *store, stop);
      if (bytes.ok()) {
        result.saved++;
        observer_->OnSnapshot(SnapshotOp::kDrain, *bytes, absl::Now() - begin);
        continue;
      }
      {
        absl::MutexLock lock(&mutex_);
        if (session->gone != GoneReason::kNone) continue;  // closed meanwhile
      }
      result.lost++;
      observer_->OnSnapshotFailed(SnapshotOp::kDrain);
      if (result.first_error.empty()) result.first_error = std::string(bytes.status().message());
    }
  }
}

}  // namespace attnd

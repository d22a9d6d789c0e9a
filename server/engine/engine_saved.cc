// Sessions that outlive the process: saved when it ends, found and served by the next one.
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

absl::Status EngineImpl::AdoptFile(SnapshotStore* store, const SnapshotStore::Entry& file) {
  const std::string& name = file.name;
  const absl::StatusOr<SessionId> id = ParseSessionId(name);
  if (!id.ok()) return id.status();
  const absl::StatusOr<SnapshotHeader> header = ReadHeader(*store, name);
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
      source = PinSession(*session, pool_.get());
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

// Sessions on their way out of the engine and into it, as snapshots.
#include "server/engine/transfer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"
#include "server/engine/session_snapshot.h"

namespace attnd {
namespace {

using absl::StrCat;

// What the reader is given at a time: an error is found within so many bytes of its place.
constexpr size_t kReadBytes = size_t{64} << 10;
constexpr absl::Duration kCacheRetryDelay = absl::Milliseconds(500);

absl::Status DrainingError() {
  return MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the server is shutting down");
}

absl::Status TooManyTokens(absl::string_view message, int64_t requested, int64_t limit) {
  return MakeError(absl::StatusCode::kResourceExhausted, "TOO_MANY_TOKENS", message,
                   {{"requested", StrCat(requested)}, {"limit", StrCat(limit)}});
}

int64_t BlocksToAllocate(const SnapshotLayout& layout, const Session& session) {
  const SessionCache& cache = session.cache;
  return std::max(layout.NumBlocks(), cache.BlocksFor(session.model->config.reserve_tokens) * cache.num_layers());
}

const char* NameOf(KvDType dtype) {
  constexpr const char* kNames[] = {"F32", "BF16", "F16", "INT8"};
  return kNames[static_cast<int>(dtype)];
}

// Names the first field that is not as expected.
absl::Status CheckExpected(const SessionConfig& expected, const SessionConfig& config) {
  const auto differ = [](absl::string_view name, const auto& want, const auto& have) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_CONFIG",
                     StrCat("the snapshot's session has ", name, " ", have, ", expected was ", want),
                     {{"field", std::string(name)}, {"expected", StrCat(want)}, {"actual", StrCat(have)}});
  };
  const auto number = [&](absl::string_view name, int want, int have) {
    return want == have ? absl::OkStatus() : differ(name, want, have);
  };
  absl::Status status = number("num_layers", expected.num_layers, config.num_layers);
  status.Update(number("num_q_heads", expected.heads.num_q_heads, config.heads.num_q_heads));
  status.Update(number("num_kv_heads", expected.heads.num_kv_heads, config.heads.num_kv_heads));
  status.Update(number("head_dim", expected.shape.head_dim, config.shape.head_dim));
  status.Update(number("value_dim", expected.shape.value_dim, config.shape.value_dim));
  if (status.ok() && expected.shape.dtype != config.shape.dtype) {
    status = differ("kv_dtype", NameOf(expected.shape.dtype), NameOf(config.shape.dtype));
  }
  return status;
}

}  // namespace

int64_t BytesToAllocate(const SnapshotLayout& layout, const Session& session) {
  return BlocksToAllocate(layout, session) * static_cast<int64_t>(session.cache.block_bytes());
}

absl::Status AllocateSession(const SnapshotLayout& layout, BlockPool* pool, Session* session) {
  SessionCache& cache = session->cache;
  const int64_t block_bytes = static_cast<int64_t>(cache.block_bytes());
  const int64_t blocks = BlocksToAllocate(layout, *session);
  const int64_t most_blocks = pool->capacity_bytes() / block_bytes;
  // A window frees blocks, but not their entries in the table, of which a few bytes of a snapshot can ask for many.
  const int64_t most_entries = std::max(kMinTableEntries, pool->capacity_bytes() / kCacheBytesPerTableEntry);
  const int64_t available = pool->available_bytes();
  if (blocks > most_blocks) {
    return TooManyTokens(StrCat("the session needs ", blocks, " blocks of ", block_bytes,
                                " bytes, the cache has room for ", most_blocks),
                         blocks, most_blocks);
  }
  if (layout.NumTableEntries() > most_entries) {
    return TooManyTokens(StrCat("the session's block tables need ", layout.NumTableEntries(),
                                " entries, with this cache they may have ", most_entries),
                         layout.NumTableEntries(), most_entries);
  }
  const bool reserved = cache.reserved_bytes() > 0 || cache.Reserve(session->model->config.reserve_tokens);
  if (reserved && cache.AllocateLayers(layout.lengths, layout.first_tokens)) return absl::OkStatus();
  const int64_t needed = blocks * block_bytes;
  return MakeError(absl::StatusCode::kResourceExhausted, "CACHE_FULL",
                   StrCat("the session needs ", needed, " bytes of cache, ", available, " are available of ",
                          pool->capacity_bytes()),
                   {{"needed_bytes", StrCat(needed)}, {"available_bytes", StrCat(available)}}, kCacheRetryDelay);
}

// ---- out ---------------------------------------------------------------------------------------------------------

// Pins the session's blocks by a cache of its own, so that the session may be stepped and closed meanwhile.
class EngineImpl::Export final : public SessionExport {
 public:
  Export(EngineImpl* engine, const Session& session, absl::Time start) ABSL_EXCLUSIVE_LOCKS_REQUIRED(engine->mutex_)
      : engine_(engine),
        model_(session.model),
        start_(start),
        cache_(engine->pool_.get(), model_->layout.block_bytes, model_->config.num_layers,
               model_->config.heads.num_kv_heads) {
    cache_.Pin(session.cache);
  }
  ~Export() override ABSL_LOCKS_EXCLUDED(engine_->mutex_) { engine_->ReleaseCache(&cache_); }

  // Before anything else, and without the mutex: what can be made later need not be made under it.
  void Begin() {
    writer_.emplace(cache_, model_->layout,
                    MakeSnapshotHeader(LayoutOf(cache_, *model_), {.config = model_->config, .identity = {}}));
  }
  int64_t total_bytes() const override { return writer_->total_bytes(); }
  absl::StatusOr<std::string> Next() override {
    std::string piece;
    if (!writer_->Next(&piece) && !std::exchange(ended_, true)) {
      engine_->observer_->OnSnapshot(EngineObserver::SnapshotOp::kExport, total_bytes(), absl::Now() - start_);
    }
    return piece;
  }

 private:
  EngineImpl* const engine_;
  const std::shared_ptr<const SessionModel> model_;
  const absl::Time start_;
  SessionCache cache_;
  std::optional<SnapshotWriter> writer_;
  bool ended_ = false;
};

void EngineImpl::ExportSession(std::string session_id, ExportDone done) {
  auto exported = std::make_shared<std::unique_ptr<Export>>();
  MoveSessions(
      {&session_id, 1},
      [this, exported, start = absl::Now()](Sessions sessions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        *exported = std::make_unique<Export>(this, *sessions[0], start);
        sessions_.Touch(sessions[0].get(), absl::Now());
        return absl::OkStatus();
      },
      [exported, done = std::move(done)](absl::Status status) mutable {
        if (!status.ok()) return done(std::move(status));
        (*exported)->Begin();
        done(std::move(*exported));
      });
}

// ---- in ----------------------------------------------------------------------------------------------------------

// The session is complete but for its place in the table, which Finish gives it.
class EngineImpl::Import final : public SessionImport {
 public:
  Import(EngineImpl* engine, std::optional<SessionConfig> expected)
      : engine_(engine), expected_(std::move(expected)), start_(absl::Now()) {}
  ~Import() override {
    if (session_ != nullptr) engine_->DropImport(session_);
  }

  absl::Status Write(absl::string_view bytes) override {
    while (!bytes.empty() && status_.ok()) {
      const absl::string_view some = bytes.substr(0, kReadBytes);
      bytes.remove_prefix(some.size());
      received_ += static_cast<int64_t>(some.size());
      status_ = Damaged(reader_.Write(some));
      if (status_.ok() && session_ == nullptr && reader_.header() != nullptr) status_ = TakeMemory();
      if (!status_.ok()) Failed();
    }
    return status_;
  }

  void Finish(SessionDone done) override {
    if (status_.ok()) {
      status_ = Damaged(reader_.Finish());
      if (!status_.ok()) Failed();
    }
    if (!status_.ok()) return done(status_);
    status_ = absl::FailedPreconditionError("the import was finished before");
    engine_->OpenImported(std::exchange(session_, nullptr),
                          [engine = engine_, bytes = received_, start = start_,
                           done = std::move(done)](absl::StatusOr<SessionInfo> info) mutable {
                            using Op = EngineObserver::SnapshotOp;
                            if (info.ok()) {
                              engine->observer_->OnSnapshot(Op::kImport, bytes, absl::Now() - start);
                            } else {
                              engine->observer_->OnSnapshotFailed(Op::kImport);
                            }
                            done(std::move(info));
                          });
  }

 private:
  absl::Status TakeMemory() {
    absl::StatusOr<SessionRecord> record = ReadSnapshotHeader(*reader_.header());
    if (!record.ok()) return record.status();
    if (expected_.has_value()) {
      if (absl::Status status = CheckExpected(*expected_, record->config); !status.ok()) return status;
    }
    if (record->config.ttl == absl::ZeroDuration()) record->config.ttl = engine_->options_.session_idle_ttl;
    auto model = std::make_shared<const SessionModel>(std::move(record->config));
    absl::StatusOr<SessionPtr> session = engine_->PrepareImport(std::move(model), reader_.header()->layout);
    if (!session.ok()) return session.status();
    session_ = *std::move(session);
    return Damaged(reader_.SetTarget(&session_->cache, &session_->model->layout));
  }

  // The reader's error, in the wire contract's words and with the place that it was found at.
  absl::Status Damaged(const absl::Status& status) const {
    if (status.ok()) return status;
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SNAPSHOT",
                     StrCat(status.message(), " (found by byte ", received_, ")"), {{"offset", StrCat(received_)}});
  }

  void Failed() {
    if (session_ != nullptr) engine_->DropImport(std::exchange(session_, nullptr));
    engine_->observer_->OnSnapshotFailed(EngineObserver::SnapshotOp::kImport);
    engine_->Reject(status_);
  }

  EngineImpl* const engine_;
  const std::optional<SessionConfig> expected_;
  const absl::Time start_;
  SnapshotReader reader_;
  SessionPtr session_;  // null until the header is complete
  int64_t received_ = 0;
  absl::Status status_;
};

std::unique_ptr<SessionImport> EngineImpl::ImportSession(std::optional<SessionConfig> expected) {
  return std::make_unique<Import>(this, std::move(expected));
}

absl::StatusOr<EngineImpl::SessionPtr> EngineImpl::PrepareImport(std::shared_ptr<const SessionModel> model,
                                                                 const SnapshotLayout& layout) {
  absl::MutexLock lock(&mutex_);
  if (draining_) return DrainingError();
  if (absl::Status status = CheckSessionLimit(); !status.ok()) return status;
  auto session = std::make_shared<Session>(NewSessionId(), 0, std::move(model), pool_.get());
  absl::Status status = AllocateSession(layout, pool_.get(), session.get());
  // Where idle sessions go to disk, room comes later: the client may come again.
  while (GetErrorDetails(status).reason == "CACHE_FULL" && MakeRoom(BytesToAllocate(layout, *session)) == Room::kMade) {
    status = AllocateSession(layout, pool_.get(), session.get());
  }
  if (!status.ok()) {
    (void)session->cache.Release(1);  // it holds no block
    return status;
  }
  imports_++;
  return session;
}

void EngineImpl::DropImport(const SessionPtr& session) {
  {
    absl::MutexLock lock(&mutex_);
    imports_--;
  }
  ReleaseBlocks(session);
}

void EngineImpl::OpenImported(SessionPtr session, SessionDone done) {
  absl::StatusOr<SessionInfo> result;
  {
    absl::MutexLock lock(&mutex_);
    if (draining_) {
      result = DrainingError();
    } else if (!prepared_shapes_.contains(ShapeKey(session->model->config.shape))) {
      creates_.push_back({session->model, std::move(done), std::move(session)});
      if (!busy_) work_cv_.Signal();
      return;
    } else {
      result = InsertImported(session);
    }
  }
  if (result.ok()) {
    observer_->OnSessionCreated(EngineObserver::Origin::kImport);
  } else {
    DropImport(session);
    Reject(result.status());
  }
  done(std::move(result));
}

SessionInfo EngineImpl::InsertImported(const SessionPtr& session) {
  imports_--;
  session->sequence = next_sequence_++;
  InsertSession(session);
  return Describe(*session);
}

}  // namespace attnd

// Life of the engine and of its sessions. The queue's entrance is in engine_submit.cc, the compute thread in
// engine_compute.cc.
#include "server/engine/engine_impl.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"
#include "server/engine/session_id.h"
#include "server/engine/step_plan.h"

namespace attnd {
namespace {

// Blocks freed under the mutex at a time: tens of microseconds.
constexpr int64_t kReleaseBlocks = 1024;
constexpr int kReapSessions = 64;
constexpr int kListSessions = 64;

absl::Status UnavailableError() {
  return MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the server is shutting down");
}

Scheduler::Limits MakeLimits(const EngineOptions& options) {
  return {options.max_queue_tokens, options.max_queue_requests, options.prefill_chunk_tokens, options.max_attend_bytes};
}

absl::Status CheckOptions(const EngineOptions& o) {
  const auto positive = [](absl::string_view name, int64_t value) {
    if (value > 0) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(name, " must be positive, got ", value));
  };
  absl::Status status = positive("kv_cache_bytes", o.kv_cache_bytes);
  status.Update(positive("compute_threads", o.compute_threads));
  status.Update(positive("max_sessions", o.max_sessions));
  status.Update(positive("max_queue_tokens", o.max_queue_tokens));
  status.Update(positive("max_queue_requests", o.max_queue_requests));
  status.Update(positive("prefill_chunk_tokens", o.prefill_chunk_tokens));
  if (o.prefill_chunk_time <= absl::ZeroDuration()) {
    status.Update(absl::InvalidArgumentError("prefill_chunk_time must be positive"));
  }
  if (!o.spill_dir.empty() && !o.evict_lru) {
    status.Update(absl::InvalidArgumentError("spill_dir needs evict_lru"));
  }
  if (o.max_attend_bytes < 0) status.Update(absl::InvalidArgumentError("max_attend_bytes must not be negative"));
  if (o.session_idle_ttl <= absl::ZeroDuration()) {
    status.Update(absl::InvalidArgumentError("session_idle_ttl must be positive"));
  }
  return status;
}

}  // namespace

Engine::~Engine() = default;

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options, EngineObserver* observer) {
  absl::Status status = CheckOptions(options);
  if (!status.ok()) return status;
  EngineOptions filled = options;
  if (filled.max_attend_bytes == 0) filled.max_attend_bytes = std::max<int64_t>(1, filled.kv_cache_bytes / 8);
  absl::StatusOr<std::unique_ptr<BlockPool>> pool = BlockPool::Create({.capacity_bytes = filled.kv_cache_bytes,
                                                                       .poison = filled.poison_cache,
                                                                       .fail_allocation = filled.fail_allocation});
  if (!pool.ok()) return pool.status();
  auto engine = std::make_unique<EngineImpl>(filled, observer, *std::move(pool));
  status = engine->OpenSpillStore();
  if (!status.ok()) return status;
  return engine;
}

EngineImpl::EngineImpl(const EngineOptions& options, EngineObserver* observer, std::unique_ptr<BlockPool> pool)
    : options_(options),
      observer_(observer != nullptr ? observer : &null_observer_),
      pool_(std::move(pool)),
      scheduler_(MakeLimits(options)),
      chunk_budget_(options.prefill_chunk_time, options.compute_threads),
      runner_(options.compute_threads, options.compute_hook),
      spill_thread_([this] { SpillLoop(); }),
      restore_thread_([this] { RestoreLoop(); }),
      reaper_thread_([this] { ReaperLoop(); }),
      compute_thread_([this] { ComputeLoop(); }) {}

EngineImpl::~EngineImpl() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = draining_ = abandoned_ = true;
    stop_spills_ = stop_restores_ = true;
    work_cv_.Signal();
    reaper_cv_.Signal();
    spill_cv_.Signal();
    restore_cv_.Signal();
    room_cv_.SignalAll();
  }
  compute_thread_.join();
  reaper_thread_.join();
  spill_thread_.join();
  restore_thread_.join();
  Afterwards after;
  {
    absl::MutexLock lock(&mutex_);
    FailQueued(UnavailableError(), &after);
  }
  RunAfterwards(std::move(after));
  for (;;) {
    std::vector<SessionPtr> left;
    {
      absl::MutexLock lock(&mutex_);
      left = sessions_.List(0, kReapSessions);
      for (const SessionPtr& session : left) sessions_.Remove(session, GoneReason::kClosed);
    }
    if (left.empty()) break;
    for (const SessionPtr& session : left) ReleaseBlocks(session);
  }
}

bool EngineImpl::Drain(absl::Time deadline) {
  Afterwards after;
  bool drained;
  {
    absl::MutexLock lock(&mutex_);
    draining_ = true;
    stat_draining_ = true;
    drained = mutex_.AwaitWithDeadline(absl::Condition(this, &EngineImpl::IsDrained), deadline);
    if (!drained) {
      abandoned_ = true;
      FailQueued(UnavailableError(), &after);
    }
  }
  RunAfterwards(std::move(after));
  return drained;
}

void EngineImpl::CreateSession(SessionConfig config, SessionDone done) {
  const absl::Status valid = ValidateConfig(config);
  if (!valid.ok()) return done(valid);
  if (config.ttl == absl::ZeroDuration()) config.ttl = options_.session_idle_ttl;
  auto model = std::make_shared<const SessionModel>(std::move(config));
  absl::StatusOr<SessionInfo> result;
  {
    absl::MutexLock lock(&mutex_);
    if (draining_) {
      result = UnavailableError();
    } else if (prepared_shapes_.contains(ShapeKey(model->config.shape))) {
      result = OpenAndDescribe(std::move(model));
    } else {
      creates_.push_back({std::move(model), std::move(done), nullptr});
      if (!busy_) work_cv_.Signal();
      return;
    }
  }
  if (result.ok()) {
    observer_->OnSessionCreated(EngineObserver::Origin::kCreate);
  } else {
    Reject(result.status());
  }
  done(std::move(result));
}

void EngineImpl::PrepareAndCreate(std::vector<PendingCreate> creates) {
  for (PendingCreate& create : creates) {
    const KvShape shape = create.model->config.shape;
    PrepareKernels(shape);
    absl::StatusOr<SessionInfo> result;
    {
      absl::MutexLock lock(&mutex_);
      prepared_shapes_.insert(ShapeKey(shape));
      if (abandoned_) {
        result = UnavailableError();
      } else if (create.imported != nullptr) {
        result = InsertImported(create.imported);
      } else {
        result = OpenAndDescribe(std::move(create.model));
      }
    }
    using Origin = EngineObserver::Origin;
    if (result.ok()) {
      observer_->OnSessionCreated(create.imported != nullptr ? Origin::kImport : Origin::kCreate);
    } else {
      if (create.imported != nullptr) DropImport(create.imported);
      Reject(result.status());
    }
    create.done(std::move(result));
  }
}

absl::StatusOr<SessionInfo> EngineImpl::OpenAndDescribe(std::shared_ptr<const SessionModel> model) {
  const absl::StatusOr<SessionPtr> session = OpenSession(std::move(model));
  if (!session.ok()) return session.status();
  return Describe(**session);
}

absl::StatusOr<EngineImpl::SessionPtr> EngineImpl::OpenSession(std::shared_ptr<const SessionModel> model) {
  if (absl::Status status = CheckSessionLimit(); !status.ok()) return status;
  SessionId id = NewSessionId();
  auto session = std::make_shared<Session>(id, next_sequence_++, std::move(model), pool_.get());
  const int64_t reserve_tokens = session->model->config.reserve_tokens;
  const int64_t needed = session->cache.BlocksFor(reserve_tokens) * session->cache.num_layers() *
                         static_cast<int64_t>(session->cache.block_bytes());
  bool reserved = session->cache.Reserve(reserve_tokens);
  while (!reserved && needed <= options_.kv_cache_bytes && MakeRoom(needed) == Room::kMade) {
    reserved = session->cache.Reserve(reserve_tokens);
  }
  if (!reserved) {
    const int64_t available = pool_->available_bytes();
    (void)session->cache.Release(1);
    const bool never = needed > options_.kv_cache_bytes;
    return MakeError(absl::StatusCode::kResourceExhausted, "CACHE_FULL",
                     absl::StrCat("reserve_tokens of ", reserve_tokens, " needs ", needed, " bytes of cache, ",
                                  available, " are available of ", options_.kv_cache_bytes),
                     {{"needed_bytes", absl::StrCat(needed)}, {"available_bytes", absl::StrCat(available)}},
                     never ? absl::ZeroDuration() : absl::Milliseconds(500));
  }
  InsertSession(session);
  return session;
}

absl::Status EngineImpl::CheckSessionLimit() const {
  const int64_t sessions = sessions_.size() + imports_;
  if (sessions < options_.max_sessions) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, "SESSION_LIMIT",
                   absl::StrCat("there are ", sessions, " sessions; the limit is ", options_.max_sessions),
                   {{"limit", absl::StrCat(options_.max_sessions)}}, absl::Seconds(1));
}

void EngineImpl::InsertSession(const SessionPtr& session) {
  const absl::Time now = absl::Now();
  session->create_time = now;
  sessions_.Insert(session, now);
  stat_sessions_ = sessions_.size();
  WakeReaper();
}

absl::StatusOr<EngineImpl::SessionPtr> EngineImpl::FindSession(absl::string_view text) {
  const absl::StatusOr<SessionId> id = ParseSessionId(text);
  if (!id.ok()) return id.status();
  return sessions_.Find(*id);
}

SessionInfo EngineImpl::Describe(const Session& session) const {
  SessionInfo info;
  info.session_id = FormatSessionId(session.id);
  info.config = session.model->config;
  info.layer_lengths.reserve(session.cache.num_layers());
  if (session.stored != nullptr) {
    info.layer_lengths = session.stored->lengths;
    info.layer_first_tokens = session.stored->first_tokens;
    info.spilled_bytes = session.stored->bytes;
  } else {
    for (int i = 0; i < session.cache.num_layers(); i++) {
      info.layer_lengths.push_back(session.cache.length(i));
      info.layer_first_tokens.push_back(session.cache.first_token(i));
    }
  }
  info.used_bytes = session.cache.used_bytes();
  info.reserved_bytes = session.cache.reserved_bytes();
  info.create_time = session.create_time;
  info.idle_time =
      session.pending > 0 ? absl::ZeroDuration() : std::max(absl::ZeroDuration(), absl::Now() - session.idle_since);
  info.time_to_live = std::max(absl::ZeroDuration(), info.config.ttl - info.idle_time);
  info.sequence = session.sequence;
  return info;
}

absl::StatusOr<SessionInfo> EngineImpl::GetSession(absl::string_view session_id) {
  absl::MutexLock lock(&mutex_);
  absl::StatusOr<SessionPtr> session = FindSession(session_id);
  if (!session.ok()) return session.status();
  return Describe(**session);
}

std::vector<SessionInfo> EngineImpl::ListSessions(uint64_t after, int limit) {
  std::vector<SessionInfo> out;
  while (static_cast<int>(out.size()) < limit) {
    absl::MutexLock lock(&mutex_);  // anew for every few: a long list must not hold up steps
    const int want = std::min(kListSessions, limit - static_cast<int>(out.size()));
    const std::vector<SessionPtr> some = sessions_.List(after, want);
    for (const SessionPtr& session : some) out.push_back(Describe(*session));
    if (static_cast<int>(some.size()) < want) break;
    after = some.back()->sequence;
  }
  return out;
}

absl::StatusOr<bool> EngineImpl::CloseSession(absl::string_view session_id) {
  SessionPtr session;
  std::unique_ptr<StoredSession> stored;
  bool release;
  {
    absl::MutexLock lock(&mutex_);
    const absl::StatusOr<SessionId> id = ParseSessionId(session_id);
    if (!id.ok()) return id.status();
    absl::StatusOr<SessionPtr> found = sessions_.Find(*id);
    if (!found.ok()) {
      if (sessions_.WhyGone(*id) != GoneReason::kNone) return false;
      return found.status();
    }
    session = *std::move(found);
    sessions_.Remove(session, GoneReason::kClosed);
    stat_sessions_ = sessions_.size();
    release = !session->running;  // else the end of its step, or of its way back from disk, does it
    stored = Unstore(session.get());
  }
  if (release) ReleaseBlocks(session);
  RemoveStored(*session, std::move(stored));
  observer_->OnSessionClosed("closed");
  return true;
}

void EngineImpl::ReleaseCache(SessionCache* cache) {
  for (;;) {
    absl::MutexLock lock(&mutex_);
    if (cache->Release(kReleaseBlocks)) return;
  }
}

void EngineImpl::WakeReaper() {
  if (sessions_.next_expiry() < reaper_wakes_) reaper_cv_.Signal();
}

void EngineImpl::ReaperLoop() {
  for (;;) {
    std::vector<SessionPtr> expired;
    {
      absl::MutexLock lock(&mutex_);
      while (!stopping_) {
        // While draining they stay, to be saved.
        if (!draining_) expired = sessions_.TakeExpired(absl::Now(), kReapSessions);
        if (!expired.empty()) break;
        reaper_wakes_ = draining_ ? absl::InfiniteFuture() : sessions_.next_expiry();
        reaper_cv_.WaitWithDeadline(&mutex_, reaper_wakes_);
      }
      if (stopping_ && expired.empty()) return;
      stat_sessions_ = sessions_.size();
    }
    for (const SessionPtr& session : expired) {
      ReleaseBlocks(session);  // it has no pending job
      std::unique_ptr<StoredSession> stored;
      {
        absl::MutexLock lock(&mutex_);
        stored = Unstore(session.get());
      }
      RemoveStored(*session, std::move(stored));
      observer_->OnSessionClosed("expired");
    }
  }
}

CapacityEstimate EngineImpl::Estimate(const SessionConfig& config) {
  CapacityEstimate estimate;
  if (!ValidateConfig(config).ok()) return estimate;
  const int64_t block_bytes = static_cast<int64_t>(BlockLayout(config.shape).block_bytes);
  const int64_t bytes_per_block_index = block_bytes * config.num_layers * config.heads.num_kv_heads;
  const PoolGauges gauges = pool_->gauges();
  estimate.bytes_per_token = bytes_per_block_index / kBlockTokens;
  estimate.tokens_capacity = gauges.capacity_bytes / bytes_per_block_index * kBlockTokens;
  estimate.tokens_available = (gauges.capacity_bytes - gauges.reserved_bytes) / bytes_per_block_index * kBlockTokens;
  return estimate;
}

EngineStats EngineImpl::stats() const {
  EngineStats stats;
  const PoolGauges gauges = pool_->gauges();
  stats.sessions_active = stat_sessions_;
  stats.sessions_spilled = stat_sessions_spilled_;
  stats.spilled_bytes = stat_spilled_bytes_;
  stats.sessions_limit = options_.max_sessions;
  stats.queue_depth = stat_queue_depth_;
  stats.queue_limit = options_.max_queue_requests;
  stats.queue_tokens = stat_queue_tokens_;
  stats.queue_tokens_limit = options_.max_queue_tokens;
  stats.capacity_bytes = gauges.capacity_bytes;
  stats.reserved_bytes = gauges.reserved_bytes;
  stats.used_bytes = gauges.used_bytes;
  stats.shared_bytes = gauges.shared_bytes;
  stats.cache_tokens = gauges.tokens;
  stats.draining = stat_draining_;
  return stats;
}

}  // namespace attnd

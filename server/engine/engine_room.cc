// Memory is short: which sessions make room, and who waits for it.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"
#include "server/engine/step_plan.h"

namespace attnd {
namespace {

// More than asked for goes to disk at a time, so that not every step waits for the disk: this part of the cache.
constexpr int64_t kSpillShare = 64;

// A session that is idle, and to which no memory is promised.
bool MayLeave(const Session& session) {
  return session.pending == 0 && !session.running && !session.spilling && session.model->config.reserve_tokens == 0;
}

int64_t FreedBytes(const Session& session) {
  return session.cache.CountUnshared() * static_cast<int64_t>(session.cache.block_bytes());
}

bool IsCacheFull(const absl::Status& status) {
  return absl::IsResourceExhausted(status) && GetErrorDetails(status).reason == "CACHE_FULL";
}

}  // namespace

EngineImpl::Room EngineImpl::MakeRoom(int64_t bytes) {
  if (!options_.evict_lru || draining_) return spilling_bytes_ > 0 ? Room::kComing : Room::kNone;
  if (spill_store_ != nullptr) return SpillSessions(bytes) ? Room::kComing : Room::kNone;
  return DropSessions(bytes) ? Room::kMade : Room::kNone;
}

bool EngineImpl::DropSessions(int64_t bytes) {
  // Nobody is dropped for a request that would not fit all the same.
  int64_t could_free = pool_->available_bytes();
  absl::flat_hash_map<BlockId, uint32_t> references;
  for (const Session* s = sessions_.oldest(); s != nullptr && could_free < bytes; s = s->newer) {
    if (!MayLeave(*s)) continue;
    could_free += s->cache.CountFreedAfter(&references) * static_cast<int64_t>(s->cache.block_bytes());
  }
  if (could_free < bytes) return false;
  bool dropped = false;
  const auto done = [&] { return dropped && pool_->available_bytes() >= bytes; };
  // Sessions that share all their blocks free nothing alone: they come second.
  for (const bool shared_too : {false, true}) {
    Session* next;
    for (Session* s = sessions_.oldest(); s != nullptr && !done(); s = next) {
      next = s->newer;
      if (!MayLeave(*s) || s->cache.used_bytes() == 0 || (!shared_too && FreedBytes(*s) == 0)) continue;
      const SessionPtr session = sessions_.Shared(*s);
      sessions_.Remove(session, GoneReason::kEvicted);
      while (!session->cache.Release(session->cache.used_bytes())) {
      }
      dropped = true;
      observer_->OnEvicted(EngineObserver::Eviction::kDropped);
      observer_->OnSessionClosed("evicted");
    }
  }
  stat_sessions_ = sessions_.size();
  return dropped;
}

bool EngineImpl::SpillSessions(int64_t bytes) {
  if (absl::Now() < spill_again_) return spilling_bytes_ > 0;
  const int64_t wanted = std::max(bytes, options_.kv_cache_bytes / kSpillShare);
  int64_t coming = std::max<int64_t>(0, pool_->available_bytes()) + spilling_bytes_;
  for (const bool shared_too : {false, true}) {
    for (Session* s = sessions_.oldest(); s != nullptr; s = s->newer) {
      if (coming >= wanted && spilling_bytes_ > 0) break;
      if (!MayLeave(*s) || s->cache.longest() == 0) continue;
      const int64_t freed = FreedBytes(*s);
      if (freed == 0 && !shared_too) continue;
      s->spilling = true;
      // So that a session which frees nothing counts as one on its way all the same.
      const int64_t counted = std::max<int64_t>(freed, 1);
      spilling_bytes_ += counted;
      coming += counted;
      spill_queue_.push_back({sessions_.Shared(*s), counted});
      spill_cv_.Signal();
    }
  }
  return spilling_bytes_ > 0;
}

std::string EngineImpl::WhyNotSpilled() const {
  if (absl::Now() >= spill_again_) return "";  // an old error says nothing of now
  return absl::StrCat("; idle sessions cannot be moved to disk: ", spill_error_);
}

bool EngineImpl::StageWithRoom(const Job& job, size_t segment, SegmentRun* run) {
  for (;;) {
    run->status = StageSegment(job.step.layer, job.step.segments[segment], *pool_, run);
    if (run->status.ok() || !IsCacheFull(run->status)) return true;
    const SessionCache& cache = run->session->cache;
    const int64_t fresh = cache.BlocksToStage(job.step.layer, run->kv_start, run->num_tokens);
    const int64_t promised = cache.reserved_bytes() - cache.used_bytes();
    switch (MakeRoom(std::max<int64_t>(0, fresh * static_cast<int64_t>(cache.block_bytes()) - promised))) {
      case Room::kMade:
        continue;
      case Room::kComing:
        run->status = absl::OkStatus();
        return false;
      case Room::kNone:
        if (const std::string why = WhyNotSpilled(); !why.empty()) {
          ErrorDetails details = GetErrorDetails(run->status);
          run->status =
              MakeError(absl::StatusCode::kResourceExhausted, details.reason, absl::StrCat(run->status.message(), why),
                        {{"needed_bytes", details.metadata["needed_bytes"]},
                         {"available_bytes", details.metadata["available_bytes"]}},
                        details.retry_delay);
        }
        return true;
    }
  }
}

void EngineImpl::HoldForRoom(Job* job) {
  for (SegmentRun& run : job->runs) {
    if (!run.entered) continue;
    run.session->cache.Abort(&run.staged);
    run.session->running = run.entered = false;
  }
  job->started = false;
  job->awaited++;
  room_waiters_.push_back(job->id);
  scheduler_.PutOnHold(job->id);
}

void EngineImpl::TellRoomMade() {
  spills_ended_++;
  room_cv_.SignalAll();
  for (const uint64_t job_id : std::exchange(room_waiters_, {})) EndWait(job_id);
}

void EngineImpl::EndWait(uint64_t job_id) {
  const auto it = jobs_.find(job_id);
  if (it == jobs_.end()) return;  // given up meanwhile
  if (--it->second->awaited > 0) return;
  scheduler_.Release(job_id);
  if (!busy_) work_cv_.Signal();
}

}  // namespace attnd

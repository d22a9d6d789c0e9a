// What the engine says of itself, beside what the model holds.
#include <algorithm>
#include <filesystem>
#include <thread>

#include "tests/unit/engine/model/driver.h"

namespace attnd {
namespace {

// A segment that was refused before anything was queued for its session.
bool IsAtTheDoor(const EngineCall& call, const std::string& id) {
  for (size_t i = 0; i < call.outcome.segments.size(); i++) {
    const std::string reason = ReasonOf(call.outcome.segments[i].status);
    if (call.segments[i].session_id == id) return reason == "BAD_SHAPE" || reason == "TOO_MANY_TOKENS";
  }
  return false;
}

}  // namespace

ModelSession* ModelDriver::Find(const std::string& id) const {
  for (const SessionPtr& session : sessions_) {
    if (session->id == id) return session.get();
  }
  return nullptr;
}

std::string ModelDriver::WhyGone(const std::string& id) const {
  const auto it = gone_.find(id);
  return it == gone_.end() ? "NEVER_EXISTED" : it->second;
}

void ModelDriver::Forget(const std::string& id, const std::string& reason) {
  const auto same = [&](const SessionPtr& session) { return session->id == id; };
  sessions_.erase(std::remove_if(sessions_.begin(), sessions_.end(), same), sessions_.end());
  gone_[id] = reason;
  constexpr size_t kIds = 32;  // to be asked for again
  if (gone_ids_.size() < kIds) {
    gone_ids_.push_back(id);
  } else {
    gone_ids_[gone_.size() % kIds] = id;
  }
  totals_->outcomes["gone: " + reason]++;
}

// The sessions that were idle longest make room, and only when it is needed.
void ModelDriver::FindEvicted(const Turn& turn) {
  const int64_t active = engine_->stats().sessions_active;
  if (room_ != Room::kDrop || active == static_cast<int64_t>(sessions_.size())) return;
  std::vector<SessionPtr> evicted;
  for (const SessionPtr& session : sessions_) {
    if (ReasonOf(engine_->GetSession(session->id).status()) == "EVICTED") evicted.push_back(session);
  }
  std::vector<std::string> named;
  for (const auto& call : turn.calls) {
    for (std::string& id : call->Names()) named.push_back(std::move(id));
  }
  const bool failed = faults_.counts().allocations > turn.faults_before.allocations;
  for (const SessionPtr& session : evicted) {
    Forget(session->id, "EVICTED");
    if (session->reserve_tokens > 0) Fail("session ", session->id, " with a reservation was evicted");
    if (!turn.alone()) continue;
    if (!turn.takes_room && !failed) Fail("session ", session->id, " was evicted though memory was not short");
    if (std::find(named.begin(), named.end(), session->id) != named.end() &&
        !IsAtTheDoor(*turn.calls[0], session->id)) {
      Fail("session ", session->id, " was evicted by its own call");
    }
  }
  for (const SessionPtr& gone : evicted) {
    for (const SessionPtr& here : sessions_) {
      if (!turn.alone() || here->on_disk || here->reserve_tokens > 0 || !here->had_own_blocks) continue;
      if (std::find(named.begin(), named.end(), here->id) != named.end() || here->used_until >= gone->used_since)
        continue;
      Fail("session ", gone->id, " was evicted before ", here->id, ", which was idle longer");
    }
  }
}

void ModelDriver::CompareSession(const std::string& id) {
  ModelSession* const session = Find(id);
  const absl::StatusOr<SessionInfo> info = engine_->GetSession(id);
  const std::string expected = session == nullptr ? WhyGone(id) : "";
  if (ReasonOf(info.status()) != expected) {
    return Fail("session ", id, " is '", ReasonOf(info.status()), "', expected '", expected, "'");
  }
  if (session == nullptr) return;
  const bool on_disk = info->spilled_bytes > 0;
  if (on_disk && !session->on_disk) {
    if (room_ != Room::kSpill) Fail("session ", id, " is on disk");
    session->MoveToDisk();
  } else if (!on_disk && session->on_disk) {
    session->MoveToMemory();
  }
  for (size_t i = 0; i < session->layers.size(); i++) {
    const ModelLayer& layer = session->layers[i];
    if (info->layer_lengths[i] == layer.length() && info->layer_first_tokens[i] == layer.first_token) continue;
    return Fail("layer ", i, " of session ", id, " has tokens ", info->layer_first_tokens[i], " to ",
                info->layer_lengths[i], ", expected ", layer.first_token, " to ", layer.length());
  }
  // For a moment its file is there, and its blocks are still to be freed.
  const int64_t held = on_disk && (room_ != Room::kSpill || info->used_bytes == 0) ? 0 : session->HeldBytes();
  if (info->used_bytes != held) Fail("session ", id, " uses ", info->used_bytes, " bytes, expected ", held);
  session->outstanding = info->reserved_bytes - info->used_bytes;
  if (session->outstanding < 0 || (session->reserve_tokens == 0 && session->outstanding > 0)) {
    Fail("session ", id, " has ", info->reserved_bytes, " bytes reserved, of which it uses ", info->used_bytes);
  }
}

void ModelDriver::CompareMemory() {
  const EngineStats stats = engine_->stats();
  if (!(0 <= stats.used_bytes && stats.used_bytes <= stats.reserved_bytes &&
        stats.reserved_bytes <= stats.capacity_bytes && 0 <= stats.shared_bytes &&
        stats.shared_bytes <= stats.used_bytes)) {
    Fail("used ", stats.used_bytes, " (shared ", stats.shared_bytes, "), reserved ", stats.reserved_bytes,
         ", capacity ", stats.capacity_bytes);
  }
  if (stats.sessions_active != static_cast<int64_t>(sessions_.size())) {
    Fail(stats.sessions_active, " sessions are open, expected ", sessions_.size());
  }
  if (stats.queue_depth != 0 || stats.queue_tokens != 0) Fail(stats.queue_depth, " requests are queued");
  if (room_ == Room::kSpill) return;  // it changes by itself; see Settle
  int64_t used = 0, shared = 0, outstanding = 0, on_disk = 0;
  counted_++;
  for (const SessionPtr& session : sessions_) {
    session->CountBlocks(counted_, &used, &shared);
    outstanding += session->outstanding;
    on_disk += session->on_disk ? 1 : 0;
  }
  for (const HeldExport& held : exports_) held.session->CountBlocks(counted_, &used, &shared);
  if (stats.used_bytes != used || stats.shared_bytes != shared || stats.reserved_bytes != used + outstanding ||
      stats.sessions_spilled != on_disk) {
    Fail("used ", stats.used_bytes, ", shared ", stats.shared_bytes, ", reserved ", stats.reserved_bytes, ", on disk ",
         stats.sessions_spilled, "; expected ", used, ", ", shared, ", ", used + outstanding, ", ", on_disk);
  }
}

void ModelDriver::Compare(const Turn& turn) {
  FindEvicted(turn);
  // A call of several sessions that fails tells one reason only; another of them may have been found damaged.
  const bool read_failed = faults_.counts().reads > turn.faults_before.reads;
  for (const auto& call : turn.calls) {
    for (const std::string& id : call->Names()) {
      const ModelSession* const session = Find(id);
      if (session == nullptr || !(read_failed || session->damaged)) continue;
      if (absl::IsDataLoss(engine_->GetSession(id).status())) Forget(id, "SPILL_DAMAGED");
    }
    for (const std::string& id : call->Names()) CompareSession(id);
    if (call->status.ok() && !call->info.session_id.empty()) CompareSession(call->info.session_id);
  }
  CompareMemory();
}

bool ModelDriver::WaitFor(const std::function<bool()>& condition) {
  for (int i = 0; i < 20000; i++) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::microseconds(i < 100 ? 20 : 500));
  }
  return false;
}

// Every session, once nothing is on its way to disk: its blocks are counted once, at least; each that it might share
// has its own, at most (what came back from disk is not shared any more).
void ModelDriver::Settle() {
  int64_t least = 0, most = 0, shared = 0, outstanding = 0;
  EngineStats stats;
  const bool settled = WaitFor([&] {
    for (const SessionPtr& session : sessions_) CompareSession(session->id);
    counted_++;
    least = most = shared = outstanding = 0;
    for (const SessionPtr& session : sessions_) {
      session->CountBlocks(counted_, &least, &shared);
      most += session->on_disk ? 0 : session->HeldBytes();
      outstanding += session->outstanding;
    }
    for (const HeldExport& held : exports_) {
      held.session->CountBlocks(counted_, &least, &shared);
      most += held.session->HeldBytes();
    }
    stats = engine_->stats();
    return !failure_.empty() || (stats.used_bytes >= least && stats.used_bytes <= most &&
                                 stats.reserved_bytes == stats.used_bytes + outstanding);
  });
  if (!settled) {
    Fail("used ", stats.used_bytes, ", reserved ", stats.reserved_bytes, "; expected ", least, " to ", most, " and ",
         outstanding, " more");
  }
}

int ModelDriver::CountFiles() const {
  namespace fs = std::filesystem;
  int count = 0;
  for (const std::string& directory : {options_.spill_dir, save_directory_}) {
    if (directory.empty() || !fs::exists(directory)) continue;
    for (const auto& entry : fs::directory_iterator(directory)) {
      const auto extension = entry.path().extension();
      if (extension == ".attnd" || extension == ".tmp") count++;
    }
  }
  return count;
}

}  // namespace attnd

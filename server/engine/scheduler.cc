#include "server/engine/scheduler.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace attnd {

bool Scheduler::HasRoom(int64_t tokens) const {
  if (queued_items_ == 0) return true;
  return queued_items_ < limits_.queue_items && tokens <= limits_.queue_tokens - queued_tokens_;
}

void Scheduler::Add(Item item) {
  assert(item.scratch_bytes <= limits_.scratch_bytes);
  auto owned = std::make_unique<Entry>();
  Entry* const entry = owned.get();
  entry->item = std::move(item);
  const bool is_new = items_.emplace(entry->item.id, std::move(owned)).second;
  assert(is_new);
  (void)is_new;
  queued_items_++;
  queued_tokens_ += entry->item.tokens;
  if (entry->item.prefill) prefill_tokens_left_ += entry->item.tokens;
  if (entry->item.held) entry->waits_for++;
  for (const uint64_t lane_id : entry->item.lanes) {
    Lane& lane = lanes_[lane_id];
    if (!lane.empty()) entry->waits_for++;
    lane.push_back(entry);
  }
  if (entry->waits_for == 0) MakeReady(entry);
}

void Scheduler::MakeReady(Entry* entry) { (entry->item.prefill ? prefills_ : decodes_).push_back(entry); }

Scheduler::Batch Scheduler::Form(absl::Time now, double work, const Questions& ask) {
  Batch batch;
  DropStalePrefills(now, ask, &batch);
  const bool prefills_turn = last_was_decodes_ && !prefills_.empty();
  last_was_decodes_ = false;
  FormDecodes(now, /*all=*/!prefills_turn, ask, &batch);
  if (!last_was_decodes_) FormPrefills(now, {limits_.prefill_chunk_tokens, work}, ask, &batch);
  if (batch.chunks.empty()) FormDecodes(now, /*all=*/true, ask, &batch);
  return batch;
}

void Scheduler::DropStalePrefills(absl::Time now, const Questions& ask, Batch* batch) {
  std::vector<Entry*> fresh;
  while (!prefills_.empty()) {
    Entry* const entry = prefills_.front();
    prefills_.pop_front();
    if (!DropIfStale(entry, now, ask, batch)) fresh.push_back(entry);
  }
  prefills_.insert(prefills_.begin(), fresh.begin(), fresh.end());
}

// All that are ready, or only those that compute nothing: they hold nobody up and need not wait for a turn.
void Scheduler::FormDecodes(absl::Time now, bool all, const Questions& ask, Batch* batch) {
  bool scratch_blocked = false;
  std::deque<Entry*> waiting;
  while (!decodes_.empty()) {  // items that a drop makes ready come in at the end
    Entry* const entry = decodes_.front();
    decodes_.pop_front();
    if (DropIfStale(entry, now, ask, batch)) continue;
    const bool computes = entry->item.tokens > 0;
    if ((computes && !all) || !StartFits(*entry, &scratch_blocked)) {
      waiting.push_back(entry);
      continue;
    }
    Start(entry);
    if (computes) {
      last_was_decodes_ = true;
      last_decode_ = now;
    }
    batch->chunks.push_back({entry->item.id, 0, entry->item.tokens, true});
  }
  decodes_ = std::move(waiting);
}

void Scheduler::FormPrefills(absl::Time now, Budget budget, const Questions& ask, Batch* batch) {
  bool scratch_blocked = false;
  std::vector<Entry*> waiting, served;
  while (!prefills_.empty() && budget.tokens > 0 && budget.work > 0) {
    const int64_t turns = static_cast<int64_t>(prefills_.size());
    Entry* const entry = prefills_.front();
    prefills_.pop_front();
    if (DropIfStale(entry, now, ask, batch)) continue;
    if (!entry->started && !StartFits(*entry, &scratch_blocked)) {
      waiting.push_back(entry);
      continue;
    }
    if (!entry->started) {
      Start(entry);
      entry->cost = ask.cost(entry->item.id);
    }
    const int64_t tokens = std::min(budget.tokens, std::max(kMinChunkTokens, budget.tokens / turns));
    const bool decodes_lately = now - last_decode_ < kLately;
    CutChunk(entry, {tokens, budget.work / static_cast<double>(turns)},
             decodes_lately ? entry->cost.least_tokens : entry->cost.min_tokens, &budget, batch);
    const bool last = batch->chunks.back().last;
    if (!last) served.push_back(entry);
  }
  // Those that had no turn come first next time.
  prefills_.insert(prefills_.begin(), waiting.begin(), waiting.end());
  prefills_.insert(prefills_.end(), served.begin(), served.end());
}

// Gives the item its next chunk, for its share of the budgets, and takes from these what it costs.
void Scheduler::CutChunk(Entry* entry, const Budget& share, int64_t least, Budget* budget, Batch* batch) {
  const int64_t begin = entry->done_tokens, left = entry->item.tokens - begin;
  const auto work = [&](int64_t tokens) {  // as if all looked back on as many keys as the last one
    return entry->cost.work_per_key * static_cast<double>(entry->cost.history + begin + tokens) *
           static_cast<double>(tokens);
  };
  int64_t tokens = std::min(left, share.tokens);
  while (tokens > least && work(tokens) > share.work) tokens = std::max(least, tokens * 7 / 8);
  entry->done_tokens += tokens;
  budget->tokens -= tokens;
  budget->work -= work(tokens);
  prefill_tokens_left_ -= tokens;
  batch->chunks.push_back({entry->item.id, begin, begin + tokens, tokens == left});
}

bool Scheduler::DropIfStale(Entry* entry, absl::Time now, const Questions& ask, Batch* batch) {
  const bool cancelled = ask.is_cancelled(entry->item.id);
  if (!cancelled && entry->item.deadline > now) return false;
  batch->dropped.push_back({entry->item.id, cancelled});
  Erase(entry);
  return true;
}

bool Scheduler::StartFits(const Entry& entry, bool* scratch_blocked) const {
  if (entry.item.scratch_bytes == 0) return true;
  // Once one has to wait, those behind it wait too: small ones must not starve a large one.
  if (running_scratch_bytes_ + entry.item.scratch_bytes > limits_.scratch_bytes) *scratch_blocked = true;
  return !*scratch_blocked;
}

void Scheduler::Start(Entry* entry) {
  entry->started = true;
  queued_items_--;
  queued_tokens_ -= entry->item.tokens;
  running_scratch_bytes_ += entry->item.scratch_bytes;
}

void Scheduler::PutOnHold(uint64_t id) {
  Entry* const entry = items_.find(id)->second.get();
  assert(entry->started && !entry->item.held && entry->waits_for == 0);
  MakeUnready(entry);
  entry->started = false;
  queued_items_++;
  queued_tokens_ += entry->item.tokens;
  running_scratch_bytes_ -= entry->item.scratch_bytes;
  if (entry->item.prefill) prefill_tokens_left_ += entry->done_tokens;
  entry->done_tokens = 0;
  entry->item.held = true;
  entry->waits_for = 1;
}

void Scheduler::Release(uint64_t id) {
  Entry* const entry = items_.find(id)->second.get();
  assert(entry->item.held);
  entry->item.held = false;
  if (--entry->waits_for == 0) MakeReady(entry);
}

void Scheduler::MakeUnready(Entry* entry) {
  std::deque<Entry*>& ready = entry->item.prefill ? prefills_ : decodes_;
  ready.erase(std::remove(ready.begin(), ready.end(), entry), ready.end());
}

void Scheduler::Finish(uint64_t id) {
  const auto it = items_.find(id);
  assert(it != items_.end());
  Entry* const entry = it->second.get();
  MakeUnready(entry);
  Erase(entry);
}

void Scheduler::Erase(Entry* entry) {
  if (entry->started) {
    running_scratch_bytes_ -= entry->item.scratch_bytes;
  } else {
    queued_items_--;
    queued_tokens_ -= entry->item.tokens;
  }
  if (entry->item.prefill) prefill_tokens_left_ -= entry->item.tokens - entry->done_tokens;
  for (const uint64_t lane_id : entry->item.lanes) {
    const auto it = lanes_.find(lane_id);
    Lane& lane = it->second;
    const bool was_head = lane.front() == entry;
    lane.erase(std::find(lane.begin(), lane.end(), entry));
    if (lane.empty()) {
      lanes_.erase(it);
    } else if (was_head && --lane.front()->waits_for == 0) {
      MakeReady(lane.front());
    }
  }
  items_.erase(entry->item.id);
}

}  // namespace attnd

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
  for (const uint64_t lane_id : entry->item.lanes) {
    Lane& lane = lanes_[lane_id];
    if (!lane.empty()) entry->lanes_ahead++;
    lane.push_back(entry);
  }
  if (entry->lanes_ahead == 0) MakeReady(entry);
}

void Scheduler::MakeReady(Entry* entry) { (entry->item.prefill ? prefills_ : decodes_).push_back(entry); }

Scheduler::Batch Scheduler::Form(absl::Time now, const Questions& ask) {
  Batch batch;
  // Prefills first: one that is dropped may make a decode of its lane ready.
  FormPrefills(now, ask, &batch);
  FormDecodes(now, ask, &batch);
  return batch;
}

void Scheduler::FormDecodes(absl::Time now, const Questions& ask, Batch* batch) {
  bool scratch_blocked = false;
  std::deque<Entry*> waiting;
  while (!decodes_.empty()) {  // items that a drop makes ready come in at the end
    Entry* const entry = decodes_.front();
    decodes_.pop_front();
    if (DropIfStale(entry, now, ask, batch)) continue;
    if (!StartFits(*entry, &scratch_blocked)) {
      waiting.push_back(entry);
      continue;
    }
    Start(entry);
    batch->chunks.push_back({entry->item.id, 0, entry->item.tokens, true});
  }
  decodes_ = std::move(waiting);
}

void Scheduler::FormPrefills(absl::Time now, const Questions& ask, Batch* batch) {
  bool scratch_blocked = false;
  int64_t budget = limits_.prefill_chunk_tokens;
  std::vector<Entry*> waiting, served;
  while (!prefills_.empty() && budget > 0) {
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
      entry->history = ask.history(entry->item.id);
    }
    budget -= CutChunk(entry, std::min(budget, std::max(kMinChunkTokens, budget / turns)), batch);
    const bool last = batch->chunks.back().last;
    if (!last) served.push_back(entry);
  }
  // Those that had no turn come first next time.
  prefills_.insert(prefills_.begin(), waiting.begin(), waiting.end());
  prefills_.insert(prefills_.end(), served.begin(), served.end());
}

// Gives the item its next chunk, for `share` of the budget; returns what it takes of it.
int64_t Scheduler::CutChunk(Entry* entry, int64_t share, Batch* batch) {
  const int64_t begin = entry->done_tokens;
  const int64_t keys = std::max(kFullChunkKeys, entry->history + begin);
  const int64_t tokens = std::max(std::min(share, kMinChunkTokens), share * kFullChunkKeys / keys);
  const int64_t end = std::min(entry->item.tokens, begin + tokens);
  entry->done_tokens = end;
  prefill_tokens_left_ -= end - begin;
  batch->chunks.push_back({entry->item.id, begin, end, end == entry->item.tokens});
  return ((end - begin) * keys + kFullChunkKeys - 1) / kFullChunkKeys;
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

void Scheduler::Finish(uint64_t id) {
  const auto it = items_.find(id);
  assert(it != items_.end());
  Entry* const entry = it->second.get();
  std::deque<Entry*>& ready = entry->item.prefill ? prefills_ : decodes_;
  ready.erase(std::remove(ready.begin(), ready.end(), entry), ready.end());
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
    } else if (was_head && --lane.front()->lanes_ahead == 0) {
      MakeReady(lane.front());
    }
  }
  items_.erase(entry->item.id);
}

}  // namespace attnd

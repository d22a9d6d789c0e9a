// Decides what is computed next. Pure: no clock, no mutex, no threads, and nothing of tensors; the caller adds items,
// asks for batches with the time of its choice and says when an item is finished.
//
// Behaviour
//   - An item waits in the lanes (sessions) that it names, first come first served in each. It is ready when it is at
//     the head of all of them and keeps that place until it is finished: the items of a lane never overlap or overtake.
//   - Continuous batching: a batch takes every ready decode item, whole, or else chunks of prefill items, which share a
//     budget of tokens per batch. The two take turns while both are ready: a decode waits for one batch of chunks and
//     is then answered without another one. Items without tokens compute nothing and go into either. So that a batch
//     takes about as long whatever a model's size and its history, a budget of work bounds the chunks too, down to a
//     few tokens.
//   - Cancelled and expired items are dropped when a batch is formed, between the chunks of a prefill too.
//   - The queue (items that have not started) is bounded in tokens and in items. An item larger than the token bound
//     is taken when nothing else waits: it could never come in otherwise.
//   - An item can be put on hold, when what it needs is on its way: it keeps its place in its lanes, holds up those
//     behind it, and is not ready before it is released.
//   - Items that need scratch memory start, in order, when theirs fits beside that of the running ones.
#ifndef ATTND_SERVER_ENGINE_SCHEDULER_H_
#define ATTND_SERVER_ENGINE_SCHEDULER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/time/time.h"

namespace attnd {

class Scheduler {
 public:
  struct Limits {
    int64_t queue_tokens = 0;
    int64_t queue_items = 0;
    int64_t prefill_chunk_tokens = 0;  // of all prefill items of a batch together
    int64_t scratch_bytes = 0;
  };
  struct Item {
    uint64_t id = 0;
    int64_t tokens = 0;
    bool prefill = false;                    // may be cut into chunks
    absl::InlinedVector<uint64_t, 1> lanes;  // distinct
    absl::Time deadline = absl::InfiniteFuture();
    int64_t scratch_bytes = 0;  // <= Limits::scratch_bytes
    bool held = false;          // comes in on hold
  };
  struct Chunk {
    uint64_t id = 0;
    int64_t begin = 0, end = 0;  // of the item's tokens
    bool last = false;
  };
  struct Drop {
    uint64_t id = 0;
    bool cancelled = false;  // false: its deadline passed
  };
  struct Batch {
    std::vector<Drop> dropped;  // already out of the scheduler
    std::vector<Chunk> chunks;
  };

  explicit Scheduler(const Limits& limits) : limits_(limits) {}

  bool HasRoom(int64_t tokens) const;
  // REQUIRES: the id is new; HasRoom (not checked here: internal work goes in regardless).
  void Add(Item item);
  // What a prefill's tokens cost: token i work_per_key x (history + i). The budget of work cuts no chunk below
  // `min_tokens`: each reads its history anew, and with fewer rows that, not the products, takes the time. Where there
  // have been decodes within the last second, it may cut down to `least_tokens` for their sake.
  struct Cost {
    int64_t history = 0;
    double work_per_key = 0;
    int64_t min_tokens = 16;
    int64_t least_tokens = 4;
  };
  // What is asked of the caller while a batch is formed; the cost of an item once, when it starts.
  struct Questions {
    absl::FunctionRef<bool(uint64_t id)> is_cancelled;
    absl::FunctionRef<Cost(uint64_t id)> cost;
  };
  // `work`: what the prefills of the batch may cost together.
  Batch Form(absl::Time now, double work, const Questions& ask);
  // Puts an item back on hold whose first chunk (or whole) is in the batch just formed, as if it had not started.
  void PutOnHold(uint64_t id);
  // Ends an item's hold. REQUIRES: it is on hold.
  void Release(uint64_t id);
  // Takes an item out, whatever its state: finished, failed or given up.
  void Finish(uint64_t id);

  bool has_ready() const { return !decodes_.empty() || !prefills_.empty(); }
  int64_t queued_items() const { return queued_items_; }    // not started
  int64_t queued_tokens() const { return queued_tokens_; }  // theirs
  // Tokens of prefills that are in no batch yet, of those that have started too.
  int64_t prefill_tokens_left() const { return prefill_tokens_left_; }
  int64_t ready_decodes() const { return static_cast<int64_t>(decodes_.size()); }
  int64_t size() const { return static_cast<int64_t>(items_.size()); }

 private:
  struct Entry {
    Item item;
    size_t waits_for = 0;  // lanes in which others are ahead; one more on hold
    bool started = false;
    int64_t done_tokens = 0;
    Cost cost;  // of prefills, known from the start on
  };
  // Most items are alone in their lane.
  using Lane = absl::InlinedVector<Entry*, 1>;

  static constexpr int64_t kMinChunkTokens = 64;  // of the budget of tokens
  static constexpr absl::Duration kLately = absl::Seconds(1);

  void MakeReady(Entry* entry);
  void MakeUnready(Entry* entry);
  bool DropIfStale(Entry* entry, absl::Time now, const Questions& ask, Batch* batch);
  // What is left of a batch's budgets, and an item's part of it.
  struct Budget {
    int64_t tokens = 0;
    double work = 0;
  };
  void CutChunk(Entry* entry, const Budget& share, int64_t least, Budget* budget, Batch* batch);
  bool StartFits(const Entry& entry, bool* scratch_blocked) const;
  void Start(Entry* entry);
  void DropStalePrefills(absl::Time now, const Questions& ask, Batch* batch);
  void FormDecodes(absl::Time now, bool all, const Questions& ask, Batch* batch);
  void FormPrefills(absl::Time now, Budget budget, const Questions& ask, Batch* batch);
  void Erase(Entry* entry);

  const Limits limits_;
  absl::flat_hash_map<uint64_t, std::unique_ptr<Entry>> items_;
  absl::flat_hash_map<uint64_t, Lane> lanes_;
  // Ready: not started decodes, and prefills with tokens left, in the order of their turns.
  std::deque<Entry*> decodes_;
  std::deque<Entry*> prefills_;
  bool last_was_decodes_ = false;  // the last batch, computing ones
  absl::Time last_decode_ = absl::InfinitePast();
  int64_t queued_items_ = 0;
  int64_t queued_tokens_ = 0;
  int64_t prefill_tokens_left_ = 0;
  int64_t running_scratch_bytes_ = 0;
};

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_SCHEDULER_H_

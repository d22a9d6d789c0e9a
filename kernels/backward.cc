#include "kernels/backward.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <deque>
#include <mutex>

#include "kernels/backward_tile.h"
#include "kernels/row_range.h"

namespace attnd {
namespace {

// What a kv head's tiles cost in one task, and in row tiles and key tiles apart, which both multiply scores and D_P:
// three products in f64, which count twice, and two in f32.
constexpr int kWholeCost = 8;
constexpr int kApartCost = 12;

int64_t NumRowTiles(int64_t rows) { return (rows + kBackwardTileRows - 1) / kBackwardTileRows; }

// lse, mean and, if wanted, d_q of a row tile; d_k and d_v too with `whole`.
void RunRowTile(const RowTile& tile, bool whole, BackwardScratch* scratch) {
  PackRows(tile, scratch);
  BeginRowSums(tile, scratch);
  for (int64_t t = tile.key_tile_begin; t < tile.key_tile_end; ++t) {
    PackKeys(tile, t, scratch);
    MultiplyTile(tile, t, scratch);
    AddToRowSums(tile, t, scratch);
  }
  EndRowSums(tile, scratch);
  LoadRowSums(tile, scratch);
  BeginQueryGradients(tile, scratch);
  for (int64_t t = tile.key_tile_begin; t < tile.key_tile_end; ++t) {
    PackKeys(tile, t, scratch);
    if (!scratch->kept) MultiplyTile(tile, t, scratch);
    WeighTile(tile, t, scratch);
    AddQueryGradients(tile, t, scratch);
    if (whole) AddKeyGradients(tile, t, scratch);
  }
  WriteQueryGradients(tile, scratch);
}

}  // namespace

int64_t BackwardTiles(const BackwardWork& work, int64_t queries) {
  const int64_t rows = queries * work.heads.group_size();
  return queries == work.num_queries ? NumRowTiles(rows) : rows / kBackwardTileRows;
}

int64_t BackwardPairs(const BackwardWork& work, int64_t begin, int64_t end) {
  const PlannedBackward planned(work);
  int64_t pairs = 0;
  for (int64_t t = begin; t < end; ++t) {
    const RowTile tile = MakeRowTile(planned, 0, t);
    const int64_t first = tile.key_tile_begin * kTileKeys,
                  last = std::min(work.num_keys, tile.key_tile_end * kTileKeys);
    pairs += tile.rows * (last - first);
  }
  return pairs;
}

int64_t BackwardMemoryBytes(const BackwardWork& work) {
  const int64_t rows = work.num_queries * work.heads.num_q_heads, keys = work.num_keys * work.heads.num_kv_heads;
  return rows * static_cast<int64_t>(sizeof(BackwardRow)) +
         keys * (work.head_dim + work.value_dim) * static_cast<int64_t>(sizeof(float));
}

void UseMemory(std::byte* memory, BackwardWork* work) {
  work->rows = reinterpret_cast<BackwardRow*>(memory);
  work->d_k_excess = reinterpret_cast<float*>(work->rows + work->num_queries * work->heads.num_q_heads);
  work->d_v_excess = work->d_k_excess + work->num_keys * work->heads.num_kv_heads * work->head_dim;
}

double SinkGradient(const BackwardWork& work, int head) {
  const int heads = work.heads.num_q_heads;
  double sum = 0;
  for (int64_t i = 0; i < work.num_queries; ++i) {
    const BackwardRow& row = work.rows[i * heads + head];
    sum -= std::exp(work.softmax.sinks[head] - row.lse) * row.mean;  // the row formula of a column whose u is 0
  }
  return sum;
}

struct BackwardBatch::State {
  struct Stretch {
    PlannedBackward planned;
    int64_t begin, end;  // row tiles
  };
  struct Task {
    const Stretch* stretch;
    int kv_head;
    int64_t begin, end;  // row tiles, or key tiles in the second phase
  };

  explicit State(int threads) : max_threads(threads) {}

  void ReserveScratch();
  BackwardScratch* TakeScratch();
  void GiveBack(BackwardScratch* s);
  void AddKeyTasks(const Stretch& stretch);
  void RunKeyTile(const Task& task, int64_t key_tile, BackwardScratch* s);

  std::deque<Stretch> stretches;  // tasks point to them
  std::vector<Task> tasks[kPhases];
  bool whole = true;
  const int max_threads;
  std::deque<BackwardScratch> scratch;  // as many as were ever in use at a time
  std::mutex mutex;
  std::vector<BackwardScratch*> free;  // the last is taken first
};

// Threads are not numbered by how many are at work, so what a task needs is not tied to them. The first phase's tasks
// take the first places only, since no more are ever taken at a time.
void BackwardBatch::State::ReserveScratch() {
  const size_t row_tasks = std::min<size_t>(max_threads, tasks[0].size());
  const size_t places = std::min<size_t>(max_threads, std::max(tasks[0].size(), tasks[1].size()));
  while (scratch.size() < places) scratch.emplace_back();
  free.clear();
  for (size_t i = places; i-- > 0;) {
    for (const Stretch& stretch : stretches) scratch[i].Reserve(*stretch.planned.work, i < row_tasks ? kKeptKeys : 0);
    free.push_back(&scratch[i]);
  }
}

BackwardScratch* BackwardBatch::State::TakeScratch() {
  const std::lock_guard lock(mutex);
  BackwardScratch* const s = free.back();
  free.pop_back();
  return s;
}

void BackwardBatch::State::GiveBack(BackwardScratch* s) {
  const std::lock_guard lock(mutex);
  free.push_back(s);
}

// A key tile's rows begin and end with the key: only those are looked at.
void BackwardBatch::State::AddKeyTasks(const Stretch& stretch) {
  const int64_t key_tiles = (stretch.planned.work->num_keys + kTileKeys - 1) / kTileKeys;
  for (int h = 0; h < stretch.planned.work->heads.num_kv_heads; ++h) {
    for (int64_t t = 0; t < key_tiles; ++t) tasks[1].push_back({&stretch, h, t, t + 1});
  }
}

void BackwardBatch::State::RunKeyTile(const Task& task, int64_t key_tile, BackwardScratch* s) {
  for (int64_t r = task.stretch->begin; r < task.stretch->end; ++r) {
    RowTile tile = MakeRowTile(task.stretch->planned, task.kv_head, r);
    if (key_tile < tile.key_tile_begin || key_tile >= tile.key_tile_end) continue;
    PackRows(tile, s);
    LoadRowSums(tile, s);
    PackKeys(tile, key_tile, s);
    s->kept = false;  // one place is enough
    MultiplyTile(tile, key_tile, s);
    WeighTile(tile, key_tile, s);
    AddKeyGradients(tile, key_tile, s);
  }
}

BackwardBatch::BackwardBatch(int max_threads) : state_(std::make_unique<State>(max_threads)) {
  assert(max_threads >= 1);
}

BackwardBatch::~BackwardBatch() = default;

void BackwardBatch::Clear() {
  state_->stretches.clear();
  for (auto& tasks : state_->tasks) tasks.clear();
}

void BackwardBatch::Add(const BackwardWork& work, int64_t begin, int64_t end) {
  if (begin < end) state_->stretches.push_back({PlannedBackward(work), begin, end});
}

void BackwardBatch::Plan() {
  State& s = *state_;
  int64_t heads = 0;
  for (const State::Stretch& stretch : s.stretches) heads += stretch.planned.work->heads.num_kv_heads;
  const int64_t threads = s.max_threads;
  const int64_t rounds = (heads + threads - 1) / threads;
  s.whole = kWholeCost * rounds * threads <= kApartCost * heads;
  for (const State::Stretch& stretch : s.stretches) {
    for (int h = 0; h < stretch.planned.work->heads.num_kv_heads; ++h) {
      if (s.whole) {
        s.tasks[0].push_back({&stretch, h, stretch.begin, stretch.end});
        continue;
      }
      // The last first: with causal they are the heaviest.
      for (int64_t r = stretch.end; r-- > stretch.begin;) s.tasks[0].push_back({&stretch, h, r, r + 1});
    }
    if (!s.whole) s.AddKeyTasks(stretch);
  }
  s.ReserveScratch();
}

size_t BackwardBatch::scratch_bytes() const {
  size_t bytes = 0;
  for (const BackwardScratch& scratch : state_->scratch) bytes += scratch.bytes();
  return bytes;
}

int BackwardBatch::num_tasks(int phase) const { return static_cast<int>(state_->tasks[phase].size()); }

void BackwardBatch::Run(int phase, int task_index) {
  State& s = *state_;
  const State::Task& task = s.tasks[phase][task_index];
  BackwardScratch* const scratch = s.TakeScratch();
  scratch->key_tile = -1;
  for (int64_t i = task.begin; i < task.end; ++i) {
    if (phase == 0) {
      RunRowTile(MakeRowTile(task.stretch->planned, task.kv_head, i), s.whole, scratch);
    } else {
      s.RunKeyTile(task, i, scratch);
    }
  }
  s.GiveBack(scratch);
}

}  // namespace attnd

#include "kernels/backward.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <deque>

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

  explicit State(int max_threads) : scratch(max_threads) {}

  void AddKeyTasks(const Stretch& stretch);
  void RunKeyTile(const Task& task, int64_t key_tile, BackwardScratch* s);

  std::deque<Stretch> stretches;  // tasks point to them
  std::vector<Task> tasks[kPhases];
  std::vector<BackwardScratch> scratch;
  bool whole = true;
};

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
  for (const State::Stretch& stretch : s.stretches) {
    heads += stretch.planned.work->heads.num_kv_heads;
    for (BackwardScratch& scratch : s.scratch) scratch.Reserve(*stretch.planned.work);
  }
  const int64_t threads = static_cast<int64_t>(s.scratch.size());
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
}

int BackwardBatch::num_tasks(int phase) const { return static_cast<int>(state_->tasks[phase].size()); }

void BackwardBatch::Run(int phase, int task_index, int thread) {
  State& s = *state_;
  const State::Task& task = s.tasks[phase][task_index];
  BackwardScratch* scratch = &s.scratch[thread];
  scratch->key_tile = -1;
  for (int64_t i = task.begin; i < task.end; ++i) {
    if (phase == 0) {
      RunRowTile(MakeRowTile(task.stretch->planned, task.kv_head, i), s.whole, scratch);
    } else {
      s.RunKeyTile(task, i, scratch);
    }
  }
}

}  // namespace attnd

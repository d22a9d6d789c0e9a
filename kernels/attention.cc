#include "kernels/attention.h"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "kernels/row_range.h"
#include "kernels/tile.h"

namespace attnd {
namespace {

// A tile's cost is about the blocks it reads times its rows; a block costs something however few the rows are.
constexpr int64_t kRowsOfABlock = 8;
// A tile that is more than this part of a thread's share of the batch is split into stretches of runs.
constexpr int64_t kTilesPerThread = 8;
// No stretch is more than this part of a thread's share.
constexpr int64_t kStretchesPerThread = 3;

struct PlannedTile {
  Tile tile;
  int work = 0;
  int64_t cost = 0;
  // Of a tile that is one of many of its head: which head of the batch, and the cost of all its tiles. Else 0.
  int head = 0;
  int64_t head_cost = 0;
  // Of a tile that shares blocks with others (forks of a sequence): where its group starts and how many it has, and the
  // run before which all its blocks are theirs too.
  size_t fork_group = 0;
  int forks = 0;
  int64_t shared_end = 0;
  // Of a split tile: where its runs' results lie, and how many are missing. The last to finish merges them in order.
  size_t partials = 0;
  int pending = 0;
};

// Runs [run_begin, run_end) of a tile, or of several tiles that read the same blocks there. Whole tiles are joined as
// they go; a split tile's runs write partial results.
struct Task {
  int tile = 0;  // of forks: index into `forked`
  int forks = 0;
  bool split = false;
  int64_t run_begin = 0;
  int64_t run_end = 0;
  int64_t cost = 0;
};

// vdpbf16ps and AMX flush denormals to zero whatever MXCSR says; for bf16 operands everything else on the thread does
// so too, or the streaming kernel's bits could differ from the ukernel's.
class DenormalsFlushed {
 public:
  explicit DenormalsFlushed(bool flush) : flush_(flush) {
#if defined(__SSE2__)
    saved_ = _mm_getcsr();
    if (flush_) _mm_setcsr(saved_ | 0x8040u);  // FTZ | DAZ
#endif
  }
  ~DenormalsFlushed() {
#if defined(__SSE2__)
    if (flush_) _mm_setcsr(saved_);
#endif
  }
  DenormalsFlushed(const DenormalsFlushed&) = delete;
  DenormalsFlushed& operator=(const DenormalsFlushed&) = delete;

 private:
  bool flush_;
  unsigned saved_ = 0;
};

}  // namespace

struct AttentionBatch::State {
  std::vector<TileScratch> scratch;  // [max_threads]
  std::vector<AttentionWork> works;
  std::vector<std::pair<KvShape, const ShapeKernels*>> shapes;  // those seen: Plan takes no lock for them
  std::vector<PlannedTile> tiles;
  std::vector<Task> tasks;
  std::vector<int> forked;  // tiles that share blocks, group by group
  AlignedBuffer partials;
  std::unique_ptr<std::atomic<int64_t>[]> overflows;  // per work: row * num_q_heads + head, the smallest
  size_t overflows_size = 0;
  int64_t kv_bytes = 0;

  int threads() const { return static_cast<int>(scratch.size()); }
  const ShapeKernels& KernelsOf(const KvShape& shape);
  void AddTiles(int work);
  int TileRows(const AttentionWork& work) const;
  void GroupForks();
  void ShareRuns(size_t first, size_t count, int64_t end);
  void AddTasks(int tile, int64_t total_cost, size_t* partial_floats);
  void AddStretches(const Task& whole, int64_t total_cost);
  void ReportOverflow(const PlannedTile& planned, int row);
  void RunWhole(PlannedTile& planned, TileScratch* scratch);
  void RunSplit(PlannedTile& planned, int64_t run_begin, int64_t run_end, TileScratch* scratch);
  void RunForks(const Task& task, TileScratch* scratch);
  void RunsDone(PlannedTile& planned, int64_t runs, TileScratch* scratch);
  void Finish(PlannedTile& planned, TileScratch* scratch);
  void Write(PlannedTile& planned, const float* values, const RowSums* sums, TileScratch* scratch);
};

const ShapeKernels& AttentionBatch::State::KernelsOf(const KvShape& shape) {
  for (const auto& [known, kernels] : shapes) {
    if (known == shape) return *kernels;
  }
  return *shapes.emplace_back(shape, &ShapeKernels::Get(shape)).second;
}

// Smaller tiles when the batch would not keep the threads busy. Bits do not depend on it.
int AttentionBatch::State::TileRows(const AttentionWork& work) const {
  constexpr int kMinTileRows = 32;
  const int64_t rows = work.num_queries * work.heads.group_size();
  int tile_rows = kMaxTileRows;
  while (tile_rows > kMinTileRows &&
         (rows + tile_rows - 1) / tile_rows * work.heads.num_kv_heads < 2 * int64_t{threads()}) {
    tile_rows /= 2;
  }
  return tile_rows;
}

void AttentionBatch::State::AddTiles(int index) {
  const AttentionWork& work = works[index];
  const ShapeKernels& kernels = KernelsOf(work.shape);
  const int tile_rows = TileRows(work);
  const int64_t rows = work.num_queries * work.heads.group_size();
  for (int head = 0; head < work.heads.num_kv_heads; ++head) {
    const size_t first_tile = tiles.size();
    for (int64_t first = 0; first < rows; first += tile_rows) {
      PlannedTile planned;
      planned.tile = MakeTile(work, kernels, head, first, static_cast<int>(std::min<int64_t>(tile_rows, rows - first)));
      planned.work = index;
      const int64_t blocks = planned.tile.block_end - planned.tile.block_begin;
      planned.cost = (blocks + 1) * (planned.tile.rows + kRowsOfABlock);
      kv_bytes += blocks * static_cast<int64_t>(kernels.layout().block_bytes);
      tiles.push_back(planned);
    }
    if (rows <= tile_rows) continue;
    int64_t cost = 0;
    for (size_t i = first_tile; i < tiles.size(); ++i) cost += tiles[i].cost;
    for (size_t i = first_tile; i < tiles.size(); ++i) {
      tiles[i].head = static_cast<int>(first_tile);
      tiles[i].head_cost = cost;
    }
  }
}

namespace {

// The run before which all blocks of two tiles are the same, at most `end`.
int64_t SharedEnd(const Tile& x, const Tile& y, int64_t end) {
  if (x.kernels != y.kernels || x.block_begin != y.block_begin) return x.run_begin();
  const std::byte* const* from = x.Blocks() + x.block_begin;
  const int64_t blocks = std::min(x.block_end, y.block_end) - x.block_begin;
  const int64_t same = std::mismatch(from, from + blocks, y.Blocks() + y.block_begin).first - from;
  return std::clamp((x.block_begin + same) / kRunBlocks, x.run_begin(), end);
}

}  // namespace

// Finds tiles that read the same blocks: forks of a sequence. A run that several share is computed for one after the
// other while its blocks are in L2, so that they come from memory once.
void AttentionBatch::State::GroupForks() {
  forked.clear();
  for (size_t i = 0; i < tiles.size(); ++i) {
    const PlannedTile& planned = tiles[i];
    const bool few_rows = planned.head_cost == 0 && planned.tile.work->weights == nullptr;
    if (few_rows && planned.tile.block_end - planned.tile.block_begin >= kRunBlocks) forked.push_back(i);
  }
  // In the order of their blocks' addresses those that share most stand beside each other.
  std::sort(forked.begin(), forked.end(), [this](int x, int y) {
    const Tile &a = tiles[x].tile, &b = tiles[y].tile;
    if (a.kernels != b.kernels) return std::less<>()(a.kernels, b.kernels);
    if (a.block_begin != b.block_begin) return a.block_begin < b.block_begin;
    const auto [in_a, in_b] = std::mismatch(a.Blocks() + a.block_begin, a.Blocks() + a.block_end,
                                            b.Blocks() + b.block_begin, b.Blocks() + b.block_end);
    const bool a_ends = in_a == a.Blocks() + a.block_end, b_ends = in_b == b.Blocks() + b.block_end;
    if (!a_ends && !b_ends) return std::less<>()(*in_a, *in_b);
    return a_ends != b_ends ? a_ends : x < y;
  });
  const auto shared_runs = [this](size_t i, size_t j) {
    const Tile& tile = tiles[forked[i]].tile;
    return SharedEnd(tile, tiles[forked[j]].tile, tile.run_end()) - tile.run_begin();
  };
  for (size_t first = 0; first < forked.size();) {
    size_t next = first + 1;
    int64_t runs = 0;  // that all of [first, next) share
    for (; next < forked.size(); ++next) {
      const int64_t together = shared_runs(first, next);
      // One that shares much less than the others do must neither lead them nor cost them what they share.
      const bool is_second = next == first + 1;
      const int64_t without = !is_second ? runs : next + 1 < forked.size() ? shared_runs(next, next + 1) : 0;
      if (together == 0 || 2 * together <= without) break;
      runs = is_second ? together : std::min(runs, together);
    }
    if (next - first > 1) ShareRuns(first, next - first, tiles[forked[first]].tile.run_begin() + runs);
    first = next;
  }
}

void AttentionBatch::State::ShareRuns(size_t first, size_t count, int64_t end) {
  const Tile& leader = tiles[forked[first]].tile;
  const int64_t blocks = end * kRunBlocks - leader.block_begin;
  kv_bytes -= static_cast<int64_t>(count - 1) * blocks * static_cast<int64_t>(leader.kernels->layout().block_bytes);
  for (size_t i = first; i < first + count; ++i) {
    PlannedTile& planned = tiles[forked[i]];
    planned.fork_group = first;
    planned.forks = static_cast<int>(count);
    planned.shared_end = end;
  }
}

void AttentionBatch::State::AddTasks(int index, int64_t total_cost, size_t* partial_floats) {
  PlannedTile& planned = tiles[index];
  const int64_t split_above = total_cost / (kTilesPerThread * threads());
  const int64_t begin = planned.tile.run_begin(), end = planned.tile.run_end();
  const bool whole = planned.cost <= split_above || end - begin <= 1 || planned.tile.work->weights != nullptr;
  if (whole && planned.forks == 0) {
    tasks.push_back({index, 0, false, begin, end, planned.cost});
    return;
  }
  planned.partials = *partial_floats;
  planned.pending = static_cast<int>(end - begin);
  *partial_floats += (end - begin) * RunPlaces::PlaceFloats(planned.tile);
  const int64_t run_cost = std::max<int64_t>(1, planned.cost / (end - begin));
  if (planned.forks > 0 && forked[planned.fork_group] == index) {
    const int group = static_cast<int>(planned.fork_group);
    AddStretches({group, planned.forks, true, begin, planned.shared_end, run_cost * planned.forks}, total_cost);
  }
  AddStretches({index, 0, true, planned.forks > 0 ? planned.shared_end : begin, end, run_cost}, total_cost);
}

// `whole` has the cost of one run. Half of what is left each time: long stretches, whose prefetches run on into their
// next run, are begun first, and single runs are left to even out the end.
void AttentionBatch::State::AddStretches(const Task& whole, int64_t total_cost) {
  const int64_t longest = std::max<int64_t>(1, total_cost / (kStretchesPerThread * threads()) / whole.cost);
  Task stretch = whole;
  while (stretch.run_begin < whole.run_end) {
    const int64_t runs = std::clamp<int64_t>((whole.run_end - stretch.run_begin) / 2, 1, longest);
    stretch.run_end = stretch.run_begin + runs;
    stretch.cost = runs * whole.cost;
    tasks.push_back(stretch);
    stretch.run_begin = stretch.run_end;
  }
}

void AttentionBatch::State::ReportOverflow(const PlannedTile& planned, int row) {
  if (row < 0) return;
  const int64_t key = planned.tile.QueryOf(row) * planned.tile.work->heads.num_q_heads + planned.tile.HeadOf(row);
  std::atomic<int64_t>& smallest = overflows[planned.work];
  int64_t known = smallest.load(std::memory_order_relaxed);
  while (key < known && !smallest.compare_exchange_weak(known, key, std::memory_order_relaxed)) {
  }
}

void AttentionBatch::State::Write(PlannedTile& planned, const float* values, const RowSums* sums,
                                  TileScratch* scratch) {
  ReportOverflow(planned, WriteRows(planned.tile, values, sums));
  if (planned.tile.work->weights != nullptr) WriteWeights(planned.tile, sums, scratch);
}

void AttentionBatch::State::RunWhole(PlannedTile& planned, TileScratch* scratch) {
  const Tile& tile = planned.tile;
  std::fill_n(scratch->sums(), tile.rows, RowSums{});
  PackQueries(tile, scratch);
  const RunPlaces places = RunPlaces::Joined(tile, tile.run_begin(), scratch->values(), scratch->sums(), scratch);
  ReportOverflow(planned, ComputeRuns(tile, tile.run_begin(), tile.run_end(), places, scratch));
  Write(planned, scratch->values(), scratch->sums(), scratch);
}

void AttentionBatch::State::RunSplit(PlannedTile& planned, int64_t run_begin, int64_t run_end, TileScratch* scratch) {
  const Tile& tile = planned.tile;
  PackQueries(tile, scratch);
  const RunPlaces places =
      RunPlaces::Apart(tile, tile.run_begin(), partials.As<float>() + planned.partials, RunPlaces::PlaceFloats(tile));
  ReportOverflow(planned, ComputeRuns(tile, run_begin, run_end, places, scratch));
}

void AttentionBatch::State::RunForks(const Task& task, TileScratch* scratch) {
  const int* group = &forked[task.tile];
  for (int64_t run = task.run_begin; run < task.run_end; ++run) {
    for (int i = 0; i < task.forks; ++i) RunSplit(tiles[group[i]], run, run + 1, scratch);
  }
  for (int i = 0; i < task.forks; ++i) RunsDone(tiles[group[i]], task.run_end - task.run_begin, scratch);
}

void AttentionBatch::State::RunsDone(PlannedTile& planned, int64_t runs, TileScratch* scratch) {
  const int done = static_cast<int>(runs);
  if (std::atomic_ref<int>(planned.pending).fetch_sub(done, std::memory_order_acq_rel) == done) {
    Finish(planned, scratch);
  }
}

void AttentionBatch::State::Finish(PlannedTile& planned, TileScratch* scratch) {
  const Tile& tile = planned.tile;
  const int padded = tile.kernels->PaddedRows(tile.rows), panels = tile.kernels->layout().num_panels;
  float* partial = partials.As<float>() + planned.partials;
  std::fill_n(scratch->sums(), tile.rows, RowSums{});
  for (int64_t run = tile.run_begin(); run < tile.run_end(); ++run, partial += RunPlaces::PlaceFloats(tile)) {
    MergeRun(tile.rows, padded, panels, scratch->values(), scratch->sums(), partial,
             RunPlaces::SumsBehind(tile, partial));
  }
  Write(planned, scratch->values(), scratch->sums(), scratch);
}

void PrepareKernels(const KvShape& shape) { ShapeKernels::Get(shape); }

int LeastRows(const KvShape& shape) { return ShapeKernels::Get(shape).uses_amx() ? 64 : 16; }

AttentionBatch::AttentionBatch(int max_threads) : state_(std::make_unique<State>()) {
  assert(max_threads >= 1);
  state_->scratch = std::vector<TileScratch>(max_threads);
}

AttentionBatch::~AttentionBatch() = default;

void AttentionBatch::Clear() {
  state_->works.clear();
  state_->tiles.clear();
  state_->tasks.clear();
  state_->kv_bytes = 0;
}

int AttentionBatch::Add(const AttentionWork& work) {
  assert(work.num_queries >= 0 && work.num_keys >= 0);
  assert(work.num_blocks == (work.num_keys + kBlockTokens - 1) / kBlockTokens);
  state_->works.push_back(work);
  return static_cast<int>(state_->works.size()) - 1;
}

int AttentionBatch::Plan() {
  State& s = *state_;
  s.tiles.clear();
  s.tasks.clear();
  s.kv_bytes = 0;
  if (s.overflows_size < s.works.size()) {
    s.overflows_size = std::max(s.works.size(), 2 * s.overflows_size);
    s.overflows = std::make_unique<std::atomic<int64_t>[]>(s.overflows_size);
  }
  for (size_t i = 0; i < s.works.size(); ++i) {
    s.overflows[i].store(std::numeric_limits<int64_t>::max(), std::memory_order_relaxed);
    s.AddTiles(static_cast<int>(i));
  }
  s.GroupForks();
  int64_t total = 0;
  for (const PlannedTile& planned : s.tiles) total += planned.cost;
  size_t partial_floats = 0;
  for (size_t i = 0; i < s.tiles.size(); ++i) s.AddTasks(static_cast<int>(i), total, &partial_floats);
  // A context that grows by a token asks for a little more with every run: rarely, then.
  const size_t partial_bytes = partial_floats * sizeof(float);
  if (partial_bytes > s.partials.bytes()) s.partials.Reserve(std::max(partial_bytes, 2 * s.partials.bytes()));
  // A head's many tiles follow each other, for they read the same blocks: in turn with other heads' they would find
  // nothing in L2. Its last tiles are light ones, so the end is even all the same.
  std::sort(s.tasks.begin(), s.tasks.end(), [&s](const Task& x, const Task& y) {
    const int64_t x_head = x.forks > 0 ? 0 : s.tiles[x.tile].head_cost,
                  y_head = y.forks > 0 ? 0 : s.tiles[y.tile].head_cost;
    const int64_t x_cost = x_head > 0 ? x_head : x.cost, y_cost = y_head > 0 ? y_head : y.cost;
    if (x_cost != y_cost) return x_cost > y_cost;
    if (x_head > 0 && y_head > 0 && s.tiles[x.tile].head != s.tiles[y.tile].head) {
      return s.tiles[x.tile].head < s.tiles[y.tile].head;
    }
    if (x.forks != y.forks) return x.forks > y.forks;
    if (x.cost != y.cost) return x.cost > y.cost;
    return x.tile != y.tile ? x.tile < y.tile : x.run_begin < y.run_begin;
  });
  return static_cast<int>(s.tasks.size());
}

void AttentionBatch::Run(int task_index, int thread) {
  State& s = *state_;
  assert(task_index >= 0 && task_index < static_cast<int>(s.tasks.size()) && thread >= 0 && thread < s.threads());
  const Task& task = s.tasks[task_index];
  PlannedTile& planned = s.tiles[task.forks > 0 ? s.forked[task.tile] : task.tile];
  TileScratch* scratch = &s.scratch[thread];
  const DenormalsFlushed flushed(planned.tile.kernels->flushes_denormals());
  if (task.forks > 0) {
    s.RunForks(task, scratch);
  } else if (task.split) {
    s.RunSplit(planned, task.run_begin, task.run_end, scratch);
    s.RunsDone(planned, task.run_end - task.run_begin, scratch);
  } else {
    s.RunWhole(planned, scratch);
  }
  scratch->products()->ReleaseContext();
}

AttentionResult AttentionBatch::result(int work) const {
  const int64_t key = state_->overflows[work].load(std::memory_order_relaxed);
  AttentionResult result;
  if (key == std::numeric_limits<int64_t>::max()) return result;
  const int heads = state_->works[work].heads.num_q_heads;
  result.overflow_row = key / heads;
  result.overflow_head = static_cast<int>(key % heads);
  return result;
}

int64_t AttentionBatch::kv_bytes_read() const { return state_->kv_bytes; }

}  // namespace attnd

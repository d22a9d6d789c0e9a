#include "server/engine/batch_runner.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/append.h"
#include "server/engine/errors.h"

namespace attnd {
namespace {

// Waking the other threads takes tens of microseconds: below this, one thread is done sooner.
constexpr double kInlineUs = 40;
// Rough speeds of one thread, for such choices alone.
constexpr double kBytesPerUs = 8e3;
constexpr double kFlopsPerUs = 5e4;

absl::Status OverflowError(int64_t row, int head) {
  return MakeError(absl::StatusCode::kInvalidArgument, "SCORE_OVERFLOW",
                   absl::StrCat("a score or a sum of weighted values of query row ", row, ", head ", head,
                                " is beyond the range of float"),
                   {{"row", absl::StrCat(row)}, {"head", absl::StrCat(head)}});
}

void WriteBlockRows(SegmentRun* run, int64_t begin, int64_t end, int head) {
  const BlockLayout& layout = *run->layout;
  const int64_t position = run->kv_start + begin;
  const int64_t index = position / kBlockTokens;
  const int slot = static_cast<int>(position % kBlockTokens);
  std::byte* const block = run->Block(index, head);
  const bool fresh = run->session == nullptr || index >= run->staged.first_fresh;
  if (fresh && (begin == 0 || slot == 0)) {  // nothing of this block was written yet
    const int copied = begin == 0 ? static_cast<int>(run->staged.copied_tokens) : 0;
    InitBlock(layout, block, copied == slot ? slot + static_cast<int>(end - begin) : 0);
    if (copied > 0) {
      const SessionCache& cache = run->session->cache;
      CopyTokens(layout, cache.Address(cache.block(run->staged.layer, index, head)), copied, block);
    }
  }
  const auto rows = [&](const TensorView& t) {
    return RowsView{t.row(begin) + size_t(head) * t.dim * DTypeBytes(t.dtype), t.row_bytes(), t.dtype};
  };
  WriteTokens(layout, block, slot, static_cast<int>(end - begin), rows(run->k), rows(run->v));
}

}  // namespace

int64_t VisibleKeys(const SoftmaxOptions& softmax, int64_t first_position, int64_t num_queries, int64_t num_keys) {
  if (softmax.causal) num_keys = std::clamp<int64_t>(first_position + num_queries, 0, num_keys);
  // A row that is not causal sees beyond itself, and may be far from the end.
  if (softmax.window == 0 || !softmax.causal) return num_keys;
  return std::min(num_keys, num_queries + std::min(num_keys, softmax.window - 1));
}

double EstimateAttendUs(const KvShape& shape, const HeadCounts& heads, int64_t num_queries, int64_t num_keys) {
  const double dims = shape.head_dim + shape.value_dim;
  const double bytes = dims * num_keys * heads.num_kv_heads * static_cast<double>(KvElementBytes(shape.dtype));
  return std::max(bytes / kBytesPerUs, EstimateUsPerKey(shape, heads) * num_keys * num_queries);
}

double EstimateUsPerKey(const KvShape& shape, const HeadCounts& heads) {
  return 2.0 * (shape.head_dim + shape.value_dim) * heads.num_q_heads / kFlopsPerUs;
}

double EstimateUsPerKey(const SegmentRun& run) {
  // Five products, of which three in f64, for the forward pass's two.
  constexpr double kBackwardCost = 5;
  return EstimateUsPerKey(run.layout->shape, run.heads) * (run.backward != nullptr ? kBackwardCost : 1);
}

BatchRunner::BatchRunner(int threads, std::function<absl::Status()> hook)
    : pool_(threads), batch_(threads), backward_batch_(threads), hook_(std::move(hook)) {}

void BatchRunner::Run(absl::Span<const ChunkWork> chunks) {
  batch_.Clear();
  estimated_us_ = 0;
  checks_.Run(chunks,
              [this](int64_t tasks, int64_t bytes, InputCheck::Task f) { ForEach(tasks, bytes / kBytesPerUs, f); });
  WriteRows(chunks);
  if (hook_) {
    const absl::Status status = hook_();
    for (const ChunkWork& chunk : chunks) chunk.run->status.Update(status);
  }
  Attend(chunks);
  Differentiate(chunks);
}

void BatchRunner::ForEach(int64_t tasks, double estimated_us, absl::FunctionRef<void(int64_t, int)> f) {
  if (estimated_us < kInlineUs) return WorkerPool::RunInline(tasks, f);
  pool_.Run(tasks, f);
}

void BatchRunner::WriteRows(absl::Span<const ChunkWork> chunks) {
  writes_.clear();
  double bytes = 0;
  for (const ChunkWork& chunk : chunks) {
    SegmentRun* const run = chunk.run;
    const int64_t end = run->RowsToWrite(chunk.end);
    if (!run->status.ok() || run->backward != nullptr) continue;
    for (int64_t row = run->written_rows; row < end;) {
      const int64_t next = std::min(end, row + kBlockTokens - (run->kv_start + row) % kBlockTokens);
      for (int h = 0; h < run->heads.num_kv_heads; h++) writes_.push_back({run, row, next, h});
      row = next;
    }
    bytes += 2.0 * static_cast<double>(end - run->written_rows) * (run->k.row_bytes() + run->v.row_bytes());
    run->written_rows = std::max(run->written_rows, end);
  }
  ForEach(static_cast<int64_t>(writes_.size()), bytes / kBytesPerUs, [&](int64_t task, int) {
    const WriteUnit& unit = writes_[task];
    WriteBlockRows(unit.run, unit.begin, unit.end, unit.head);
  });
}

void BatchRunner::Attend(absl::Span<const ChunkWork> chunks) {
  works_.clear();
  pieces_.clear();
  size_t num_blocks = 0;
  for (const ChunkWork& chunk : chunks) {
    if (!chunk.run->status.ok() || chunk.run->q.data == nullptr || chunk.run->backward != nullptr) continue;
    works_.push_back(&chunk);
    num_blocks += chunk.run->Work(chunk.begin, chunk.end, nullptr).num_blocks * chunk.run->heads.num_kv_heads;
    if (chunk.run->weights != nullptr) pieces_.push_back({&chunk, {}});
  }
  if (works_.empty()) return;
  blocks_.clear();
  blocks_.reserve(num_blocks);  // works point into it
  auto piece = pieces_.begin();
  for (const ChunkWork* chunk : works_) {
    const SegmentRun& run = *chunk->run;
    AttentionWork work = run.Work(chunk->begin, chunk->end, blocks_.data() + blocks_.size());
    for (int h = 0; h < run.heads.num_kv_heads; h++) {
      for (int64_t b = 0; b < work.num_blocks; b++) blocks_.push_back(run.Block(b, h));
    }
    if (run.weights != nullptr) {
      piece->weights.resize(work.num_queries * work.num_keys * run.heads.num_q_heads);
      work.weights = piece->weights.data();
      ++piece;
    }
    estimated_us_ += EstimateAttendUs(work.shape, work.heads, work.num_queries,
                                      VisibleKeys(work.softmax, work.first_position, work.num_queries, work.num_keys));
    batch_.Add(work);
  }
  const int tasks = batch_.Plan();
  ForEach(tasks, estimated_us_, [this](int64_t task, int thread) { batch_.Run(static_cast<int>(task), thread); });
  for (size_t i = 0; i < works_.size(); i++) {
    const AttentionResult result = batch_.result(static_cast<int>(i));
    if (result.overflow_row < 0) continue;
    works_[i]->run->status.Update(OverflowError(works_[i]->begin + result.overflow_row, result.overflow_head));
  }
  for (const WeightsPiece& p : pieces_) {
    const SegmentRun& run = *p.chunk->run;
    const int64_t rows = p.chunk->end - p.chunk->begin;
    for (int64_t h = 0; h < run.heads.num_q_heads; h++) {
      std::memcpy(run.weights + (h * run.num_tokens + p.chunk->begin) * run.num_keys,
                  p.weights.data() + h * rows * run.num_keys, rows * run.num_keys * sizeof(float));
    }
  }
  pieces_.clear();
}

void BatchRunner::Differentiate(absl::Span<const ChunkWork> chunks) {
  backward_batch_.Clear();
  double us = 0;
  for (const ChunkWork& chunk : chunks) {
    BackwardRun* const backward = chunk.run->backward;
    if (backward == nullptr || !chunk.run->status.ok()) continue;
    // Tiles of 64 rows, whatever the chunks are: one that a chunk cuts is computed with the chunk that ends it.
    const int64_t tiles = BackwardTiles(backward->work, chunk.end);
    backward_batch_.Add(backward->work, backward->tiles_done, tiles);
    us += EstimateUsPerKey(*chunk.run) / chunk.run->heads.group_size() *
          static_cast<double>(BackwardPairs(backward->work, backward->tiles_done, tiles));
    backward->tiles_done = tiles;
  }
  estimated_us_ += us;
  backward_batch_.Plan();
  for (int phase = 0; phase < BackwardBatch::kPhases; phase++) {
    ForEach(backward_batch_.num_tasks(phase), us,
            [this, phase](int64_t task, int) { backward_batch_.Run(phase, static_cast<int>(task)); });
  }
  gradient_check_.Run(chunks,
                      [this](int64_t tasks, double check_us, GradientCheck::Task f) { ForEach(tasks, check_us, f); });
}

}  // namespace attnd

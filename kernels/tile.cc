#include "kernels/tile.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>

#include "kernels/convert.h"
#include "kernels/prefetch.h"
#include "kernels/quantize.h"
#include "kernels/row_range.h"

namespace attnd {

namespace {

// The blocks of a run that the tile's rows may see. Null blocks are those that the explicit mask hides from all rows.
struct RunBlocks {
  const std::byte* blocks[kRunBlocks];
  int64_t first_keys[kRunBlocks];
  int slots = 0;
};

RunBlocks BlocksOfRun(const Tile& tile, int64_t run) {
  RunBlocks result;
  const int64_t begin = std::max(tile.block_begin, run * kRunBlocks);
  const int64_t end = std::min(tile.block_end, (run + 1) * kRunBlocks);
  for (int64_t b = begin; b < end; ++b) {
    const std::byte* block = tile.Blocks()[b];
    if (block == nullptr) continue;
    result.blocks[result.slots] = block;
    result.first_keys[result.slots++] = b * kBlockTokens;
  }
  return result;
}

// Fills for every row and slot of the strip which keys are allowed, and for ALiBi how far the slot's first key is from
// the row.
void FillAllowed(const Tile& tile, const RunBlocks& run, TileScratch* scratch) {
  uint64_t* allowed = scratch->allowed();
  const AttentionWork& work = *tile.work;
  const bool alibi = work.softmax.alibi_slopes != nullptr;
  int64_t query = -1;
  for (int row = 0; row < tile.rows; ++row, allowed += run.slots) {
    if (tile.QueryOf(row) == query) {
      std::copy_n(allowed - run.slots, run.slots, allowed);  // heads of a group see the same keys
    } else {
      query = tile.QueryOf(row);
      const KeyRange range = RangeOfRow(work, query);
      for (int s = 0; s < run.slots; ++s) allowed[s] = AllowedWord(work, query, range, run.first_keys[s]);
    }
    if (!alibi) continue;
    scratch->slopes()[row] = work.softmax.alibi_slopes[tile.HeadOf(row)];
    for (int s = 0; s < run.slots; ++s) {
      const int64_t distance = run.first_keys[s] - (work.first_position + query);
      scratch->distances()[row * run.slots + s] = static_cast<float>(distance);
    }
  }
}

// The strip of a run, with its allowed keys filled in.
Strip PrepareStrip(const Tile& tile, const RunBlocks& run, TileScratch* scratch) {
  const SoftmaxOptions& softmax = tile.work->softmax;
  FillAllowed(tile, run, scratch);
  Strip strip;
  strip.scores = scratch->strip();
  strip.rows = tile.rows;
  strip.slots = run.slots;
  strip.allowed = scratch->allowed();
  strip.scale = softmax.softmax_scale;
  strip.softcap = softmax.softcap;
  if (softmax.alibi_slopes != nullptr) {
    strip.slopes = scratch->slopes();
    strip.distances = scratch->distances();
  }
  return strip;
}

// Lists what will be read from this run on; null for tiles that do not prefetch.
const std::byte* const* ListAhead(const Tile& tile, const RunBlocks& run, int64_t next_run, TileScratch* scratch) {
  const int distance = tile.kernels->AheadDistance(tile.rows);
  if (distance == 0) return nullptr;
  const std::byte** entries = scratch->ahead();
  size_t count = tile.kernels->ListAhead(run.blocks, run.slots, entries);
  if (next_run < tile.run_end()) {
    const RunBlocks next = BlocksOfRun(tile, next_run);
    count += tile.kernels->ListAhead(next.blocks, std::min(next.slots, tile.kernels->AheadBlocks(tile.rows)),
                                     entries + count);
  }
  std::fill_n(entries + count, distance + Strip::kAheadRows, entries[count - 1]);
  return entries + distance;
}

Products ProductsOf(const Tile& tile, const RunBlocks& run, TileScratch* scratch) {
  Products products;
  products.q = scratch->q();
  products.q_scales = scratch->q_scales();
  products.rows = tile.rows;
  products.blocks = run.blocks;
  products.slots = run.slots;
  products.strip = scratch->strip();
  return products;
}

// One run: values [panel][padded rows][64] and a RowSums per row. Returns a row with a score beyond f32, or -1.
int ComputeRun(const Tile& tile, int64_t run_index, float* values, RowSums* sums, TileScratch* scratch) {
  const RunBlocks run = BlocksOfRun(tile, run_index);
  if (run.slots == 0) {
    std::fill_n(sums, tile.rows, RowSums{});
    return -1;
  }
  Strip strip = PrepareStrip(tile, run, scratch);
  Products products = ProductsOf(tile, run, scratch);
  products.ahead = ListAhead(tile, run, run_index + 1, scratch);
  tile.kernels->Scores(products, scratch->products());
  if (products.ahead != nullptr) strip.ahead = tile.kernels->ValuesAhead(products);
  const int bad_row = SoftmaxStrip(strip, tile.kernels->WeightFormatOf(tile.rows), sums);
  tile.kernels->Values(products, values, scratch->products());
  return bad_row;
}

size_t ValuesFloats(const Tile& tile) {
  const size_t rows = tile.kernels->PaddedRows(tile.rows);
  return rows * kPanelColumns * tile.kernels->layout().num_panels;
}

}  // namespace

RunPlaces RunPlaces::Joined(const Tile& tile, int64_t first, float* values, RowSums* sums, TileScratch* scratch) {
  RunPlaces places;
  places.tile_ = &tile;
  places.first_ = first;
  places.values_ = values;
  places.sums_ = sums;
  places.run_values_ = scratch->run_values();
  places.run_sums_ = scratch->run_sums();
  return places;
}

RunPlaces RunPlaces::Apart(const Tile& tile, int64_t first, float* places, size_t stride) {
  RunPlaces result;
  result.tile_ = &tile;
  result.first_ = first;
  result.values_ = places;
  result.stride_ = stride;
  return result;
}

size_t RunPlaces::PlaceFloats(const Tile& tile) {
  const size_t sums = static_cast<size_t>(tile.rows) * sizeof(RowSums) / sizeof(float);
  return (ValuesFloats(tile) + sums + 15) / 16 * 16;
}

RowSums* RunPlaces::SumsBehind(const Tile& tile, float* place) {
  return reinterpret_cast<RowSums*>(place + ValuesFloats(tile));
}

float* RunPlaces::ValuesOf(int64_t run) const {
  if (run_values_ != nullptr) return run == first_ ? values_ : run_values_;
  return values_ + (run - first_) * stride_;
}

RowSums* RunPlaces::SumsOf(int64_t run) const {
  if (run_values_ != nullptr) return run == first_ ? sums_ : run_sums_;
  return SumsBehind(*tile_, ValuesOf(run));
}

void RunPlaces::Done(int64_t run) const {
  if (run_values_ == nullptr || run == first_) return;
  MergeRun(tile_->rows, tile_->kernels->PaddedRows(tile_->rows), tile_->kernels->layout().num_panels, values_, sums_,
           run_values_, run_sums_);
}

TileScratch::TileScratch()
    : q_(size_t{kMaxTileRows} * kMaxHeadDim * sizeof(float)),
      strip_(kMaxTileRows * kStripLd * sizeof(float)),
      run_values_(size_t{kMaxTileRows} * kMaxHeadDim * sizeof(float)),
      values_(size_t{kMaxTileRows} * kMaxHeadDim * sizeof(float)),
      widened_(ProductScratch::kWidenedFloats * sizeof(float)),
      scratchpad_(Brgemm::kScratchpadBytes) {
  products_.widened = widened_.As<float>();
  products_.scratchpad = scratchpad_.As<void>();
}

Tile MakeTile(const AttentionWork& work, const ShapeKernels& kernels, int kv_head, int64_t first_row, int rows) {
  Tile tile;
  tile.work = &work;
  tile.kernels = &kernels;
  tile.kv_head = kv_head;
  tile.first_row = first_row;
  tile.rows = rows;
  // Ranges grow with the row: the first row's begin and the last row's end enclose all.
  const int64_t begin = RangeOfRow(work, tile.QueryOf(0)).begin;
  const int64_t end = RangeOfRow(work, tile.QueryOf(rows - 1)).end;
  if (begin >= end) return tile;
  tile.block_begin = begin / kBlockTokens;
  tile.block_end = (end + kBlockTokens - 1) / kBlockTokens;
  return tile;
}

void PackQueries(const Tile& tile, TileScratch* scratch) {
  const AttentionWork& work = *tile.work;
  const int dim = work.shape.head_dim, ld = tile.kernels->q_ld();
  const size_t row_bytes = dim * DTypeBytes(work.q_dtype);
  uint16_t rounded[kMaxHeadDim];
  const auto query = [&](int row) {
    return work.q + (tile.QueryOf(row) * work.heads.num_q_heads + tile.HeadOf(row)) * static_cast<int64_t>(row_bytes);
  };
  constexpr int kRowsAhead = 8;  // each row lies elsewhere: the hardware foresees none
  for (int row = 0; row < tile.rows; ++row) {
    const std::byte* from = query(row);
    PrefetchToL1(query(std::min(row + kRowsAhead, tile.rows - 1)), row_bytes);
    if (tile.kernels->HoldsBf16(tile.rows)) {
      uint16_t* to = reinterpret_cast<uint16_t*>(scratch->q()) + row * ld;
      RowToBf16(from, work.q_dtype, dim, to);
      if (ld > dim) to[dim] = 0;
      continue;
    }
    if (tile.kernels->quantizes()) {
      float wide[kMaxHeadDim];
      WidenRow(from, work.q_dtype, dim, wide);
      scratch->q_scales()[row] =
          QuantizeQuery(wide, dim, tile.kernels->s16_form(), scratch->q() + row * ld * sizeof(int16_t));
      continue;
    }
    float* to = reinterpret_cast<float*>(scratch->q()) + row * ld;
    if (tile.kernels->rounds_to_bf16()) {
      RowToBf16(from, work.q_dtype, dim, rounded);
      WidenRow(reinterpret_cast<const std::byte*>(rounded), DType::kBf16, dim, to);
    } else {
      WidenRow(from, work.q_dtype, dim, to);
    }
    if (ld > dim) to[dim] = 0;
  }
}

int ComputeRuns(const Tile& tile, int64_t begin, int64_t end, const RunPlaces& places, TileScratch* scratch) {
  int bad_row = -1;
  for (int64_t run = begin; run < end; ++run) {
    const int bad = ComputeRun(tile, run, places.ValuesOf(run), places.SumsOf(run), scratch);
    if (bad >= 0 && (bad_row < 0 || bad < bad_row)) bad_row = bad;
    places.Done(run);
  }
  return bad_row;
}

int WriteRows(const Tile& tile, const float* values, const RowSums* sums) {
  const AttentionWork& work = *tile.work;
  const int dim = work.shape.value_dim;
  const size_t panel_stride = static_cast<size_t>(tile.kernels->PaddedRows(tile.rows)) * kPanelColumns;
  alignas(64) float out[kMaxHeadDim];
  int bad_row = -1;
  for (int row = 0; row < tile.rows; ++row) {
    const int head = tile.HeadOf(row);
    const int64_t index = tile.QueryOf(row) * work.heads.num_q_heads + head;
    const bool empty = sums[row].sum == 0;
    float max = empty ? -HUGE_VALF : sums[row].max, sum = sums[row].sum, factor = 1.0f;
    if (work.softmax.sinks != nullptr) {
      const float sink = work.softmax.sinks[head], joint = std::max(max, sink);
      if (joint != -HUGE_VALF) {
        factor = std::exp(max - joint);
        sum = sum * factor + std::exp(sink - joint);
        max = joint;
      }
    }
    if (work.lse != nullptr) work.lse[index] = sum == 0 ? -HUGE_VALF : max + std::log(sum);
    if (empty) {
      std::fill_n(out, dim, 0.0f);
    } else {
      const float* from = values + row * kPanelColumns;
      if (!NormalizeRow(from, panel_stride, dim, factor, sum, out) && bad_row < 0) bad_row = row;
    }
    NarrowRow(out, dim, work.out_dtype, work.out + index * static_cast<int64_t>(dim * DTypeBytes(work.out_dtype)));
  }
  return bad_row;
}

void WriteWeights(const Tile& tile, const RowSums* sums, TileScratch* scratch) {
  const AttentionWork& work = *tile.work;
  const auto row_weights = [&](int row) {
    return work.weights + (tile.HeadOf(row) * work.num_queries + tile.QueryOf(row)) * work.num_keys;
  };
  for (int row = 0; row < tile.rows; ++row) std::fill_n(row_weights(row), work.num_keys, 0.0f);
  // The sink joins the denominator.
  RowSums final_sums[kMaxTileRows];
  for (int row = 0; row < tile.rows; ++row) {
    final_sums[row] = sums[row];
    if (work.softmax.sinks == nullptr || sums[row].sum == 0) continue;
    const float sink = work.softmax.sinks[tile.HeadOf(row)], max = std::max(sums[row].max, sink);
    final_sums[row] = {max, sums[row].sum * std::exp(sums[row].max - max) + std::exp(sink - max)};
  }
  for (int64_t index = tile.run_begin(); index < tile.run_end(); ++index) {
    const RunBlocks run = BlocksOfRun(tile, index);
    if (run.slots == 0) continue;
    const Strip strip = PrepareStrip(tile, run, scratch);
    tile.kernels->Scores(ProductsOf(tile, run, scratch), scratch->products());
    ProbabilityStrip(strip, final_sums);
    for (int row = 0; row < tile.rows; ++row) {
      for (int s = 0; s < run.slots; ++s) {
        const int64_t keys = std::min<int64_t>(kBlockTokens, work.num_keys - run.first_keys[s]);
        const float* from = scratch->strip() + row * kStripLd + s * kBlockTokens;
        std::copy_n(from, keys, row_weights(row) + run.first_keys[s]);
      }
    }
  }
}

}  // namespace attnd

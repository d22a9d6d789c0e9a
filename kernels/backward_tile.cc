#include "kernels/backward_tile.h"

#include <algorithm>
#include <cassert>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/backward_tile.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "hwy/highway.h"
#include "kernels/convert.h"
#include "kernels/isa.h"
#include "kernels/row_range.h"
#include "kernels/row_vectors-inl.h"
#include "kernels/tile_product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

void WidenToF64(const float* from, size_t count, double* to) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  ForVectors(hn::Lanes(d), count, [&](size_t i, size_t n) ATTND_STEP {
    hn::StoreN(hn::PromoteTo(d, hn::LoadN(df, from + i, n)), d, to + i, n);
  });
}

void MultiplyF64(const TileOperands<double>& x) { TileProduct<false>(x); }
void MultiplyF32(const TileOperands<float>& x) { TileProduct<false>(x); }
void MultiplyAddF64(const TileOperands<double>& x) { TileProduct<true>(x); }

void NarrowToF32(const double* from, size_t count, float* to) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  ForVectors(hn::Lanes(d), count, [&](size_t i, size_t n) ATTND_STEP {
    hn::StoreN(hn::DemoteTo(df, hn::LoadN(d, from + i, n)), df, to + i, n);
  });
}

// to += from, as Kahan sums: `excess` is what rounding has made `to` too large by.
void AddRow(const float* from, size_t count, float* to, float* excess) {
  const hn::ScalableTag<float> d;
  ForVectors(hn::Lanes(d), count, [&](size_t i, size_t n) ATTND_STEP {
    const auto before = hn::LoadN(d, to + i, n);
    const auto part = hn::Sub(hn::LoadN(d, from + i, n), hn::LoadN(d, excess + i, n));
    const auto after = hn::Add(before, part);
    hn::StoreN(hn::Sub(hn::Sub(after, before), part), d, excess + i, n);
    hn::StoreN(after, d, to + i, n);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {
namespace {

HWY_EXPORT(WidenToF64);
HWY_EXPORT(MultiplyF64);
HWY_EXPORT(MultiplyF32);
HWY_EXPORT(MultiplyAddF64);
HWY_EXPORT(NarrowToF32);
HWY_EXPORT(AddRow);

// Bit r of word j becomes bit j of word r (Warren, Hacker's Delight, 7-3: halves of ever smaller squares swap).
void TransposeBits(uint64_t words[64]) {
  uint64_t mask = 0x00000000FFFFFFFFu;
  for (int width = 32; width != 0; width >>= 1, mask ^= mask << width) {
    for (int i = 0; i < 64; i = (i + width + 1) & ~width) {
      const uint64_t swapped = ((words[i] >> width) ^ words[i + width]) & mask;
      words[i] ^= swapped << width;
      words[i + width] ^= swapped;
    }
  }
}

// One head's row of a tensor into f32. `index` counts such rows.
void WidenHead(const BackwardTensor& tensor, int dim, int64_t index, float* to) {
  WidenRow(tensor.data + index * static_cast<int64_t>(dim * DTypeBytes(tensor.dtype)), tensor.dtype, dim, to);
}

// f32 [rows][padded dim] to f64 [dim][64], with columns of zeros for the rows that are padding.
void TransposeToF64(const float* from, int rows, int dim, double* to) {
  const size_t ld = BackwardScratch::PaddedDim(dim), padded = BackwardScratch::PaddedRows(rows);
  for (int c = 0; c < dim; ++c, to += BackwardScratch::kLd) {
    for (int row = 0; row < rows; ++row) to[row] = double{from[row * ld + c]};
    std::fill(to + rows, to + padded, 0.0);
  }
}

// The keys' rows of a tensor as f64 [64][padded dim], with rows of zeros for the keys that are padding.
void WidenKeys(const RowTile& tile, int64_t key_tile, const BackwardTensor& tensor, int dim, float* row, double* to) {
  const size_t ld = BackwardScratch::PaddedDim(dim);
  const int keys = tile.KeysOf(key_tile), kv_heads = tile.work().heads.num_kv_heads;
  for (int key = 0; key < keys; ++key) {
    WidenHead(tensor, dim, (key_tile * kTileKeys + key) * kv_heads + tile.kv_head, row);
    HWY_DYNAMIC_DISPATCH(WidenToF64)(row, dim, to + key * ld);
  }
  std::fill(to + keys * ld, to + BackwardScratch::PaddedKeys(keys) * ld, 0.0);
}

// The scratch's part [keys][padded dim] += to rows of a gradient [num_keys, num_kv_heads, dim].
void AddPart(const RowTile& tile, int64_t key_tile, int dim, const float* part, float* gradient, float* excess) {
  const int64_t kv_heads = tile.work().heads.num_kv_heads;
  int64_t to = (key_tile * kTileKeys * kv_heads + tile.kv_head) * dim;
  for (int key = 0; key < tile.KeysOf(key_tile); ++key, to += kv_heads * dim) {
    HWY_DYNAMIC_DISPATCH(AddRow)(part + key * BackwardScratch::PaddedDim(dim), dim, gradient + to, excess + to);
  }
}

}  // namespace

PlannedBackward::PlannedBackward(const BackwardWork& w) : work(&w) {
  ranges.heads = w.heads;
  ranges.softmax = w.softmax;
  ranges.mask = w.mask;
  ranges.num_queries = w.num_queries;
  ranges.first_position = w.first_position;
  ranges.num_keys = w.num_keys;
}

RowTile MakeRowTile(const PlannedBackward& planned, int kv_head, int64_t index) {
  RowTile tile;
  tile.planned = &planned;
  tile.kv_head = kv_head;
  tile.first_row = index * kBackwardTileRows;
  const int64_t rows = planned.work->num_queries * planned.work->heads.group_size() - tile.first_row;
  tile.rows = static_cast<int>(std::min<int64_t>(kBackwardTileRows, rows));
  // Ranges grow with the row: the first row's begin and the last row's end enclose all.
  const int64_t begin = RangeOfRow(planned.ranges, tile.QueryOf(0)).begin;
  const int64_t end = RangeOfRow(planned.ranges, tile.QueryOf(tile.rows - 1)).end;
  if (begin >= end) return tile;
  tile.key_tile_begin = begin / kTileKeys;
  tile.key_tile_end = (end + kTileKeys - 1) / kTileKeys;
  return tile;
}

int RowTile::KeysOf(int64_t key_tile) const {
  return static_cast<int>(std::min<int64_t>(kTileKeys, work().num_keys - key_tile * kTileKeys));
}

void BackwardScratch::Reserve(const BackwardWork& work, int64_t kept_keys) {
  InitIsa();
  const size_t head_dim = work.head_dim, value_dim = work.value_dim;
  const size_t head_ld = PaddedDim(work.head_dim), value_ld = PaddedDim(work.value_dim);
  q_columns.Reserve(head_dim * kLd * sizeof(double));
  d_out_columns.Reserve(value_dim * kLd * sizeof(double));
  k_rows.Reserve(kTileKeys * head_ld * sizeof(double));
  v_rows.Reserve(kTileKeys * value_ld * sizeof(double));
  q.Reserve(kLd * head_ld * sizeof(float));
  d_out.Reserve(kLd * value_ld * sizeof(float));
  const int64_t tiles = std::max<int64_t>(1, (std::min(work.num_keys, kept_keys) + kTileKeys - 1) / kTileKeys);
  dots.Reserve(tiles * kTileDoubles * sizeof(double));
  d_p.Reserve(tiles * kTileDoubles * sizeof(double));
  p.Reserve(kTileDoubles * sizeof(float));
  d_s.Reserve(kTileDoubles * sizeof(float));
  d_q.Reserve(kLd * head_ld * sizeof(double));
  part.Reserve(kTileKeys * std::max(head_ld, value_ld) * sizeof(float));
}

size_t BackwardScratch::bytes() const {
  size_t bytes = 0;
  for (const AlignedBuffer* buffer :
       {&q_columns, &d_out_columns, &k_rows, &v_rows, &q, &d_out, &dots, &d_p, &p, &d_s, &d_q, &part}) {
    bytes += buffer->bytes();
  }
  return bytes;
}

void FillAllowed(const RowTile& tile, int64_t key_tile, BackwardScratch* scratch) {
  const AttentionWork& ranges = tile.planned->ranges;
  const int64_t first_key = key_tile * kTileKeys;
  const int keys = tile.KeysOf(key_tile);
  uint64_t* words = scratch->allowed;
  const KeyRange first = RangeOfRow(ranges, tile.QueryOf(0)), last = RangeOfRow(ranges, tile.QueryOf(tile.rows - 1));
  if (ranges.mask.bits == nullptr && last.begin <= first_key && first.end >= first_key + keys) {
    const uint64_t rows = tile.rows == 64 ? ~uint64_t{0} : (uint64_t{1} << tile.rows) - 1;
    std::fill_n(words, keys, rows);
    std::fill(words + keys, words + kTileKeys, uint64_t{0});
    return;
  }
  std::fill_n(words, kTileKeys, uint64_t{0});
  int64_t query = -1;
  for (int row = 0; row < tile.rows; ++row) {
    if (tile.QueryOf(row) == query) {
      words[row] = words[row - 1];  // heads of a group see the same keys
      continue;
    }
    query = tile.QueryOf(row);
    words[row] = AllowedWord(ranges, query, RangeOfRow(ranges, query), first_key);
  }
  TransposeBits(words);
}

void PackRows(const RowTile& tile, BackwardScratch* scratch) {
  const BackwardWork& work = tile.work();
  scratch->kept = tile.num_key_tiles() <= kKeptKeys / kTileKeys;
  const int head_dim = work.head_dim, value_dim = work.value_dim;
  float* q = scratch->q.As<float>();
  float* d_out = scratch->d_out.As<float>();
  for (int row = 0; row < tile.rows; ++row) {
    WidenHead(work.q, head_dim, tile.IndexOf(row), q + row * BackwardScratch::PaddedDim(head_dim));
    WidenHead(work.d_out, value_dim, tile.IndexOf(row), d_out + row * BackwardScratch::PaddedDim(value_dim));
  }
  TransposeToF64(q, tile.rows, head_dim, scratch->q_columns.As<double>());
  TransposeToF64(d_out, tile.rows, value_dim, scratch->d_out_columns.As<double>());
  if (work.softmax.alibi_slopes == nullptr) return;
  for (int row = 0; row < static_cast<int>(BackwardScratch::PaddedRows(tile.rows)); ++row) {
    const bool real = row < tile.rows;
    scratch->slopes[row] = real ? double{work.softmax.alibi_slopes[tile.HeadOf(row)]} : 0;
    scratch->positions[row] = real ? static_cast<double>(work.first_position + tile.QueryOf(row)) : 0;
  }
}

void PackKeys(const RowTile& tile, int64_t key_tile, BackwardScratch* scratch) {
  if (scratch->keys_of == tile.planned && scratch->keys_head == tile.kv_head && scratch->key_tile == key_tile) return;
  scratch->keys_of = tile.planned;
  scratch->keys_head = tile.kv_head;
  scratch->key_tile = key_tile;
  const BackwardWork& work = tile.work();
  float* row = scratch->part.As<float>();
  WidenKeys(tile, key_tile, work.k, work.head_dim, row, scratch->k_rows.As<double>());
  WidenKeys(tile, key_tile, work.v, work.value_dim, row, scratch->v_rows.As<double>());
}

void MultiplyTile(const RowTile& tile, int64_t key_tile, BackwardScratch* scratch) {
  const BackwardWork& work = tile.work();
  TileOperands<double> x;
  x.m = BackwardScratch::PaddedKeys(tile.KeysOf(key_tile));
  x.n = BackwardScratch::PaddedRows(tile.rows);
  x.a_step = 1;
  x.b_ld = x.c_ld = BackwardScratch::kLd;

  x.a = scratch->k_rows.As<double>();
  x.a_row = BackwardScratch::PaddedDim(work.head_dim);
  x.k = work.head_dim;
  x.b = scratch->q_columns.As<double>();
  x.c = scratch->DotsOf(tile, key_tile);
  HWY_DYNAMIC_DISPATCH(MultiplyF64)(x);

  x.a = scratch->v_rows.As<double>();
  x.a_row = BackwardScratch::PaddedDim(work.value_dim);
  x.k = work.value_dim;
  x.b = scratch->d_out_columns.As<double>();
  x.c = scratch->DpOf(tile, key_tile);
  HWY_DYNAMIC_DISPATCH(MultiplyF64)(x);
}

void BeginQueryGradients(const RowTile& tile, BackwardScratch* scratch) {
  std::fill_n(scratch->d_q.As<double>(), BackwardScratch::kLd * BackwardScratch::PaddedDim(tile.work().head_dim), 0.0);
}

void AddQueryGradients(const RowTile& tile, int64_t key_tile, BackwardScratch* scratch) {
  TileOperands<double> x;
  x.a = scratch->DpOf(tile, key_tile);  // d_s [keys][64 rows]: the product's rows are its columns
  x.a_row = 1;
  x.a_step = BackwardScratch::kLd;
  x.b = scratch->k_rows.As<double>();
  x.c = scratch->d_q.As<double>();
  x.n = x.b_ld = x.c_ld = BackwardScratch::PaddedDim(tile.work().head_dim);
  x.m = BackwardScratch::PaddedRows(tile.rows);
  x.k = tile.KeysOf(key_tile);
  HWY_DYNAMIC_DISPATCH(MultiplyAddF64)(x);
}

void WriteQueryGradients(const RowTile& tile, BackwardScratch* scratch) {
  const int dim = tile.work().head_dim;
  const double* from = scratch->d_q.As<double>();
  for (int row = 0; row < tile.rows; ++row, from += BackwardScratch::PaddedDim(dim)) {
    HWY_DYNAMIC_DISPATCH(NarrowToF32)(from, dim, tile.work().d_q + tile.IndexOf(row) * dim);
  }
}

void AddKeyGradients(const RowTile& tile, int64_t key_tile, BackwardScratch* scratch) {
  const BackwardWork& work = tile.work();
  TileOperands<float> x;
  x.m = BackwardScratch::PaddedKeys(tile.KeysOf(key_tile));
  x.k = tile.rows;
  x.a_row = BackwardScratch::kLd;
  x.a_step = 1;
  x.c = scratch->part.As<float>();

  x.a = scratch->d_s.As<float>();
  x.b = scratch->q.As<float>();
  x.n = x.b_ld = x.c_ld = BackwardScratch::PaddedDim(work.head_dim);
  HWY_DYNAMIC_DISPATCH(MultiplyF32)(x);
  AddPart(tile, key_tile, work.head_dim, x.c, work.d_k, work.d_k_excess);

  x.a = scratch->p.As<float>();
  x.b = scratch->d_out.As<float>();
  x.n = x.b_ld = x.c_ld = BackwardScratch::PaddedDim(work.value_dim);
  HWY_DYNAMIC_DISPATCH(MultiplyF32)(x);
  AddPart(tile, key_tile, work.value_dim, x.c, work.d_v, work.d_v_excess);
}

}  // namespace attnd
#endif  // HWY_ONCE

// One tile of the backward pass: 64 rows of a kv head's queries against 64 keys. Which tiles, in which order and on
// which thread is backward.cc's matter.
#ifndef ATTND_KERNELS_BACKWARD_TILE_H_
#define ATTND_KERNELS_BACKWARD_TILE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/aligned_buffer.h"
#include "kernels/attention.h"
#include "kernels/backward.h"
#include "kernels/block_layout.h"

namespace attnd {

inline constexpr int kTileKeys = kBlockTokens;  // a word of allowed bits
// Rows that see no more keep their tiles' products between the two passes over the keys: 1 KiB a key and thread.
inline constexpr int64_t kKeptKeys = 512;

// A work, and what row_range.h reads of it.
struct PlannedBackward {
  explicit PlannedBackward(const BackwardWork& w);
  const BackwardWork* work;
  AttentionWork ranges;
};

struct RowTile {
  const PlannedBackward* planned = nullptr;
  int kv_head = 0;
  int64_t first_row = 0;       // of num_queries * group_size
  int rows = 0;                // 1..64
  int64_t key_tile_begin = 0;  // key tiles that some row may see, the explicit mask apart
  int64_t key_tile_end = 0;

  const BackwardWork& work() const { return *planned->work; }
  int64_t QueryOf(int row) const { return (first_row + row) / work().heads.group_size(); }
  int HeadOf(int row) const {
    const int group = work().heads.group_size();
    return kv_head * group + static_cast<int>((first_row + row) % group);
  }
  int64_t IndexOf(int row) const { return QueryOf(row) * work().heads.num_q_heads + HeadOf(row); }
  int KeysOf(int64_t key_tile) const;
  int64_t num_key_tiles() const { return key_tile_end - key_tile_begin; }
};

RowTile MakeRowTile(const PlannedBackward& planned, int kv_head, int64_t index);

// What a thread needs. The f64 operands of the first two products have the rows as columns, so that the softmax's sums
// run along the lanes of vectors: nothing is ever added across a vector.
class BackwardScratch {
 public:
  // With room for the products of `kept_keys` keys, or one tile.
  void Reserve(const BackwardWork& work, int64_t kept_keys);
  size_t bytes() const;

  // Rows and columns are padded for whole vectors. What is computed of the padding is zero (rows, keys) or never used
  // (columns of f32).
  static constexpr size_t kLd = kBackwardTileRows;
  static constexpr size_t kWidestVector = 16;
  static constexpr size_t PaddedDim(int dim) { return (dim + kWidestVector - 1) / kWidestVector * kWidestVector; }
  static constexpr size_t PaddedRows(int rows) { return PaddedDim(rows); }
  static constexpr int PaddedKeys(int keys) { return (keys + 3) / 4 * 4; }  // kTileProductRows
  static constexpr size_t kTileDoubles = size_t{kTileKeys} * kBackwardTileRows;

  AlignedBuffer q_columns, d_out_columns;  // f64 [dim][64]
  AlignedBuffer k_rows, v_rows;            // f64 [64][padded dim]
  AlignedBuffer q, d_out;                  // f32 [64][padded dim]
  AlignedBuffer dots, d_p;                 // f64 [kept tiles][64 keys][64 rows]; of a tile that is weighed, d_p is d_s
  AlignedBuffer p, d_s;                    // f32 [64 keys][64 rows]
  AlignedBuffer d_q;                       // f64 [64][padded dim], the sum over key tiles
  AlignedBuffer part;                      // f32 [64][padded dim], one tile's part of d_k or d_v
  bool kept = false;                       // there is a place for every key tile

  // By row. Rows behind the last are padding.
  alignas(64) double max[kBackwardTileRows], sum[kBackwardTileRows], weighted[kBackwardTileRows];
  alignas(64) double lse[kBackwardTileRows], mean[kBackwardTileRows];
  alignas(64) double slopes[kBackwardTileRows], positions[kBackwardTileRows];  // for ALiBi
  uint64_t allowed[kTileKeys];                                                 // bit: row

  // The key tile that k_rows and v_rows hold.
  const PlannedBackward* keys_of = nullptr;
  int keys_head = 0;
  int64_t key_tile = -1;

  double* DotsOf(const RowTile& tile, int64_t key_tile_index) const {
    return dots.As<double>() + (kept ? key_tile_index - tile.key_tile_begin : 0) * kTileDoubles;
  }
  double* DpOf(const RowTile& tile, int64_t key_tile_index) const {
    return d_p.As<double>() + (kept ? key_tile_index - tile.key_tile_begin : 0) * kTileDoubles;
  }
};

void PackRows(const RowTile& tile, BackwardScratch* scratch);
void PackKeys(const RowTile& tile, int64_t key_tile, BackwardScratch* scratch);  // unless they are there
// The products of the packed rows and keys into DotsOf and DpOf.
void MultiplyTile(const RowTile& tile, int64_t key_tile, BackwardScratch* scratch);

// lse and mean of the rows, online over key tiles.
void BeginRowSums(const RowTile& tile, BackwardScratch* scratch);
void AddToRowSums(const RowTile& tile, int64_t key_tile, BackwardScratch* scratch);
void EndRowSums(const RowTile& tile, BackwardScratch* scratch);   // into work.rows
void LoadRowSums(const RowTile& tile, BackwardScratch* scratch);  // from there

// p and d_s of the tile, from its products and the rows' sums, and d_s once more as f64 in d_p's place. d_s has the
// softmax scale and the cap's slope in it.
void WeighTile(const RowTile& tile, int64_t key_tile, BackwardScratch* scratch);
// scratch->allowed: a bit per row, by key.
void FillAllowed(const RowTile& tile, int64_t key_tile, BackwardScratch* scratch);
// d_q += d_s K, in the scratch; the packed keys are the tile's.
void BeginQueryGradients(const RowTile& tile, BackwardScratch* scratch);
void AddQueryGradients(const RowTile& tile, int64_t key_tile, BackwardScratch* scratch);
void WriteQueryGradients(const RowTile& tile, BackwardScratch* scratch);
// d_k += d_s^T Q and d_v += p^T d_out, in the work's tensors.
void AddKeyGradients(const RowTile& tile, int64_t key_tile, BackwardScratch* scratch);

}  // namespace attnd

#endif  // ATTND_KERNELS_BACKWARD_TILE_H_

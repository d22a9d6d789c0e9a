// A tile: up to kMaxTileRows rows of one work and kv head, where row r is query token r / group_size and head r %
// group_size of the group, so that the head's blocks are read once for the whole group. This file computes a tile run
// by run; what runs when, and on which thread, is attention.cc's matter.
#ifndef ATTND_KERNELS_TILE_H_
#define ATTND_KERNELS_TILE_H_

#include <cstddef>
#include <cstdint>

#include "kernels/aligned_buffer.h"
#include "kernels/attention.h"
#include "kernels/shape_kernels.h"

namespace attnd {

struct Tile {
  const AttentionWork* work = nullptr;
  const ShapeKernels* kernels = nullptr;
  int kv_head = 0;
  int64_t first_row = 0;  // of num_queries * group_size
  int rows = 0;
  int64_t block_begin = 0;  // blocks that some row may see, the explicit mask apart
  int64_t block_end = 0;

  int64_t QueryOf(int row) const { return (first_row + row) / work->heads.group_size(); }
  int HeadOf(int row) const {
    const int group = work->heads.group_size();
    return kv_head * group + static_cast<int>((first_row + row) % group);
  }
  const std::byte* const* Blocks() const { return work->blocks + kv_head * work->num_blocks; }
  int64_t run_begin() const { return block_begin / kRunBlocks; }
  int64_t run_end() const { return (block_end + kRunBlocks - 1) / kRunBlocks; }
};

// Rows [first_row, first_row + rows) of a work's kv head, with the blocks that they may see.
Tile MakeTile(const AttentionWork& work, const ShapeKernels& kernels, int kv_head, int64_t first_row, int rows);

// What a thread needs while it computes tiles: 0.8 MB, of which a small tile touches little.
class TileScratch {
 public:
  TileScratch();

  std::byte* q() const { return q_.As<std::byte>(); }
  float* strip() const { return strip_.As<float>(); }
  float* run_values() const { return run_values_.As<float>(); }
  float* values() const { return values_.As<float>(); }
  RowSums* run_sums() { return run_sums_; }
  RowSums* sums() { return sums_; }
  uint64_t* allowed() { return allowed_; }
  float* distances() { return distances_; }
  float* slopes() { return slopes_; }
  float* q_scales() { return q_scales_; }
  const std::byte** ahead() { return ahead_; }
  ProductScratch* products() { return &products_; }

 private:
  AlignedBuffer q_, strip_, run_values_, values_, widened_, scratchpad_;
  RowSums run_sums_[kMaxTileRows], sums_[kMaxTileRows];
  uint64_t allowed_[kMaxTileRows * kRunBlocks];
  float distances_[kMaxTileRows * kRunBlocks];
  float slopes_[kMaxTileRows];
  float q_scales_[kMaxTileRows];
  // The present run, the beginning of the next one, and a margin that repeats the last entry.
  const std::byte* ahead_[2 * ShapeKernels::kMaxAheadEntries + ShapeKernels::kMaxAheadDistance + Strip::kAheadRows];
  ProductScratch products_;
};

// Where the results of a tile's runs go: values [panel][padded rows][64] and a RowSums a row.
class RunPlaces {
 public:
  // Runs from `first` on are joined in their order: the first is computed where the result will be, the others in
  // the scratch's run_values and run_sums.
  static RunPlaces Joined(const Tile& tile, int64_t first, float* values, RowSums* sums, TileScratch* scratch);
  // Each run to a place of its own, `stride` floats apart; its sums lie behind its values.
  static RunPlaces Apart(const Tile& tile, int64_t first, float* places, size_t stride);
  static size_t PlaceFloats(const Tile& tile);  // whole cache lines
  static RowSums* SumsBehind(const Tile& tile, float* place);

  float* ValuesOf(int64_t run) const;
  RowSums* SumsOf(int64_t run) const;
  // The run is there. Runs are done in their order.
  void Done(int64_t run) const;

 private:
  const Tile* tile_ = nullptr;
  int64_t first_ = 0;
  float* values_ = nullptr;
  RowSums* sums_ = nullptr;
  float* run_values_ = nullptr;  // null: apart
  RowSums* run_sums_ = nullptr;
  size_t stride_ = 0;
};

// Gathers the tile's queries into scratch->q(). Must precede the functions below, on the same thread.
void PackQueries(const Tile& tile, TileScratch* scratch);

// Runs [begin, end). Returns a row with a score beyond f32, or -1.
int ComputeRuns(const Tile& tile, int64_t begin, int64_t end, const RunPlaces& places, TileScratch* scratch);

// Divides, joins the sinks, converts and writes out and lse. Returns a row whose output is not finite, or -1.
int WriteRows(const Tile& tile, const float* values, const RowSums* sums);

// Writes the probabilities of the tile's rows (work->weights), from scores computed once more.
void WriteWeights(const Tile& tile, const RowSums* sums, TileScratch* scratch);

}  // namespace attnd

#endif  // ATTND_KERNELS_TILE_H_

// The softmax between the two products: over a strip, the scores of a tile's rows with one run of blocks; and the
// online merge of runs. Sums are taken in an order that column indices fix, so columns that are not allowed, or blocks
// that are left out, change no bit.
#ifndef ATTND_KERNELS_SOFTMAX_H_
#define ATTND_KERNELS_SOFTMAX_H_

#include <cstddef>
#include <cstdint>

#include "kernels/block_layout.h"

namespace attnd {

// Distance between a strip's rows in floats. 16 more than a run: rows a power of two apart would share few sets of L1.
inline constexpr size_t kStripLd = kRunTokens + 16;

enum class WeightFormat : uint8_t {
  kF32,        // in the scores' place
  kF32Coarse,  // the same with exp to 2.9e-6: for weights that will be rounded to s16
  kF32OfBf16,  // the same, rounded to bf16 values
  kBf16,       // in the scores' place: row r starts where the scores of row r started, distance 2 * kStripLd
};

// Row r: scores[r * kStripLd + slot * 64 + column]; a slot is a visible block of the run.
struct Strip {
  float* scores = nullptr;
  int rows = 0;
  int slots = 0;
  const uint64_t* allowed = nullptr;  // [rows][slots]; bit: column
  float scale = 1.0f;
  float softcap = 0.0f;
  const float* slopes = nullptr;     // [rows] ALiBi, or null
  const float* distances = nullptr;  // [rows][slots] of a slot's first key from the row's position; with slopes
  // What to prefetch meanwhile, or null: entries of a prefetch list (streaming.h), one a row, at most kAheadRows. Else
  // memory would rest while the weights are computed: 3 to 6 % of a decode.
  const std::byte* const* ahead = nullptr;
  static constexpr int kAheadRows = 8;
};

// What is known of a row after some runs: sum of exp(score - max) * value, and max and sum. sum = 0: no allowed key
// yet.
struct RowSums {
  float max = 0;
  float sum = 0;
};

// Turns scores into weights exp(score - max); what is not allowed weighs exactly 0, whatever its score was. Returns the
// first row that has a score beyond f32 among the allowed ones, or -1.
int SoftmaxStrip(const Strip& strip, WeightFormat format, RowSums* rows);

// Turns scores into probabilities with the final max and sum of each row (0 where sum is 0), f32 in place.
void ProbabilityStrip(const Strip& strip, const RowSums* rows);

// Joins a later run to what is known: both in panels [panel][padded_rows][64]. A row whose later part is empty stays.
void MergeRun(int rows, int padded_rows, int panels, float* values, RowSums* sums, const float* run_values,
              const RowSums* run_sums);

// out[c] = values[c] * factor / sum over a row's panels, which are panel_stride floats apart; never -0. False if a
// result is not finite.
bool NormalizeRow(const float* values, size_t panel_stride, int columns, float factor, float sum, float* out);

}  // namespace attnd

#endif  // ATTND_KERNELS_SOFTMAX_H_

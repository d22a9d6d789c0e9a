// Which keys a query row may see: a range from causal and window, and within it the bits of the explicit mask.
#ifndef ATTND_KERNELS_ROW_RANGE_H_
#define ATTND_KERNELS_ROW_RANGE_H_

#include <algorithm>
#include <cstdint>

#include "kernels/attention.h"

namespace attnd {

// Keys [begin, end) of a row, the explicit mask apart; begin >= end: none. Both grow with the row.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
};

inline KeyRange RangeOfRow(const AttentionWork& work, int64_t row) {
  const int64_t position = work.first_position + row;
  const SoftmaxOptions& softmax = work.softmax;
  KeyRange range{0, work.num_keys};
  if (softmax.causal) range.end = std::clamp<int64_t>(position + 1, 0, work.num_keys);
  if (softmax.window > 0 && position >= softmax.window) range.begin = position - softmax.window + 1;
  return range;
}

// Bit j: the row may see key first_key + j, for the 64 keys of a block.
uint64_t AllowedWord(const AttentionWork& work, int64_t row, const KeyRange& range, int64_t first_key);

}  // namespace attnd

#endif  // ATTND_KERNELS_ROW_RANGE_H_

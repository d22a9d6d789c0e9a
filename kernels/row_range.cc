#include "kernels/row_range.h"

#include <limits>

#include "kernels/block_layout.h"

namespace attnd {
namespace {

// Bits [begin, end) of a word; begin and end may lie outside 0..64.
uint64_t BitRange(int64_t begin, int64_t end) {
  begin = std::clamp<int64_t>(begin, 0, 64);
  end = std::clamp<int64_t>(end, 0, 64);
  if (begin >= end) return 0;
  const uint64_t below_end = end == 64 ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
  return below_end & (~uint64_t{0} << begin);
}

// `count` (1..64) bits of a bit array from bit `first` on. Reads only the bytes that hold them.
uint64_t ReadBits(const uint8_t* bits, int64_t first, int count) {
  const uint8_t* p = bits + (first >> 3);
  const int shift = static_cast<int>(first & 7);
  const int bytes = (shift + count + 7) / 8;
  uint64_t word = 0;
  for (int i = 0; i < std::min(bytes, 8); ++i) word |= uint64_t{p[i]} << (8 * i);
  word >>= shift;
  if (bytes > 8) word |= uint64_t{p[8]} << (64 - shift);
  return word & BitRange(0, count);
}

// Clears the bits of `word` (keys first_key..) that the mask forbids.
uint64_t ApplyMask(const MaskView& mask, int64_t row, int64_t first_key, uint64_t word) {
  const int64_t begin = std::max<int64_t>(first_key, mask.first_key);
  const int64_t end = std::min<int64_t>(first_key + kBlockTokens, mask.first_key + mask.columns);
  if (begin >= end) return word;
  const int64_t first_bit = (mask.first_row + row) * mask.columns + (begin - mask.first_key);
  const int shift = static_cast<int>(begin - first_key);
  const uint64_t bits = ReadBits(mask.bits, first_bit, static_cast<int>(end - begin)) << shift;
  const uint64_t covered = BitRange(begin - first_key, end - first_key);
  return word & (bits | ~covered);
}

int64_t FindEmptyRowWithoutMask(const AttentionWork& work) {
  // A row's range is empty when it starts before the first key (causal) or when its window lies behind the last one.
  if (work.num_keys <= 0 || (work.softmax.causal && work.first_position < 0)) return 0;
  constexpr int64_t kNoPosition = std::numeric_limits<int64_t>::max();
  if (work.softmax.window <= 0 || work.softmax.window > kNoPosition - work.num_keys) return -1;
  const int64_t first_position = work.num_keys - 1 + work.softmax.window;
  const int64_t row = std::max<int64_t>(0, first_position - work.first_position);
  return row < work.num_queries ? row : -1;
}

bool RowIsEmpty(const AttentionWork& work, int64_t row) {
  const KeyRange range = RangeOfRow(work, row);
  if (range.begin >= range.end) return true;
  const MaskView& mask = work.mask;
  if (range.begin < mask.first_key || range.end > mask.first_key + mask.columns) return false;
  for (int64_t key = range.begin / kBlockTokens * kBlockTokens; key < range.end; key += kBlockTokens) {
    if (AllowedWord(work, row, range, key) != 0) return false;
  }
  return true;
}

}  // namespace

uint64_t AllowedWord(const AttentionWork& work, int64_t row, const KeyRange& range, int64_t first_key) {
  const uint64_t word = BitRange(range.begin - first_key, range.end - first_key);
  if (work.mask.bits == nullptr || word == 0) return word;
  return ApplyMask(work.mask, row, first_key, word);
}

int64_t FindEmptyRow(const AttentionWork& work) {
  if (work.num_queries <= 0) return -1;
  if (work.mask.bits == nullptr) return FindEmptyRowWithoutMask(work);
  for (int64_t row = 0; row < work.num_queries; ++row) {
    if (RowIsEmpty(work, row)) return row;
  }
  return -1;
}

}  // namespace attnd

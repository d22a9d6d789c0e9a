// Which keys a row may see, against the definition key by key.
#include "kernels/row_range.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace attnd {
namespace {

bool Allowed(const AttentionWork& work, int64_t row, int64_t key) {
  const int64_t position = work.first_position + row;
  if (key < 0 || key >= work.num_keys) return false;
  if (work.softmax.causal && key > position) return false;
  if (work.softmax.window > 0 && key <= position - work.softmax.window) return false;
  return work.mask.Allows(row, key);
}

int64_t FirstEmptyRow(const AttentionWork& work) {
  for (int64_t row = 0; row < work.num_queries; ++row) {
    bool any = false;
    for (int64_t key = 0; key < work.num_keys; ++key) any |= Allowed(work, row, key);
    if (!any) return row;
  }
  return -1;
}

TEST(RowRangeTest, WordsAndEmptyRowsFollowTheDefinition) {
  std::mt19937 random(5);
  const auto pick = [&random](int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); };
  for (int round = 0; round < 3000; ++round) {
    AttentionWork work;
    work.num_keys = pick(0, 200);
    work.num_queries = pick(0, 12);
    work.first_position = pick(-15, 230);
    work.softmax.causal = pick(0, 1) == 0;
    work.softmax.window = pick(0, 1) == 0 ? 0 : pick(1, 80);
    std::vector<uint8_t> bits;
    if (pick(0, 1) == 0) {
      work.mask.columns = pick(1, 150);
      work.mask.first_key = pick(0, 100);
      work.mask.first_row = pick(0, 3);
      const int64_t count = (work.mask.first_row + work.num_queries) * work.mask.columns;
      bits.resize((count + 7) / 8);
      const int density = pick(0, 3);
      for (uint8_t& byte : bits) byte = density == 0 ? 0 : static_cast<uint8_t>(random() & random());
      work.mask.bits = bits.data();
      if (bits.empty()) work.mask = {};
    }
    EXPECT_EQ(FindEmptyRow(work), FirstEmptyRow(work)) << "round " << round;
    for (int64_t row = 0; row < work.num_queries; ++row) {
      const KeyRange range = RangeOfRow(work, row);
      for (int64_t first = 0; first < work.num_keys; first += kBlockTokens) {
        const uint64_t word = AllowedWord(work, row, range, first);
        for (int j = 0; j < kBlockTokens; ++j) {
          ASSERT_EQ((word >> j) & 1, Allowed(work, row, first + j)) << "round " << round << " key " << first + j;
        }
      }
    }
  }
}

TEST(RowRangeTest, WindowBeyondAnyPosition) {
  AttentionWork work;
  work.num_keys = 10;
  work.num_queries = 3;
  work.first_position = 7;
  work.softmax.window = INT64_MAX;
  EXPECT_EQ(FindEmptyRow(work), -1);
  EXPECT_EQ(RangeOfRow(work, 2).begin, 0);
}

}  // namespace
}  // namespace attnd

// A steady decode allocates nothing, compiles nothing and takes no lock of ours: what a step costs is then the same
// from the second one on, however many threads compute beside it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/aligned_buffer.h"
#include "kernels/append.h"
#include "kernels/attention.h"
#include "kernels/isa.h"
#include "kernels/shape_kernels.h"
#include "tests/unit/call_counts.h"

namespace attnd::testing {
namespace {

constexpr HeadCounts kHeads{8, 2};
constexpr int kMaxTokens = 4096;

// One sequence whose context grows: its blocks, and a step that appends one token and attends with the last few.
class Sequence {
 public:
  explicit Sequence(const KvShape& shape)
      : shape_(shape),
        layout_(shape),
        memory_(layout_.block_bytes * kHeads.num_kv_heads * kBlocks),
        rows_(size_t{kMaxQueries} * kHeads.num_q_heads * kMaxHeadDim, 0.25f),
        out_(rows_.size()) {
    // The table has its final stride; a work of fewer blocks has one of its own (AttentionWork::blocks).
    table_.resize(size_t{kHeads.num_kv_heads} * kBlocks);
  }

  void Step(AttentionBatch* batch, int64_t tokens, int64_t queries) {
    const int64_t num_blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
    const RowsView row{reinterpret_cast<const std::byte*>(rows_.data()), 4 * size_t{kMaxHeadDim}, DType::kF32};
    for (int head = 0; head < kHeads.num_kv_heads; ++head) {
      for (int64_t b = 0; b < num_blocks; ++b) table_[head * num_blocks + b] = Block(head, b);
      const int slot = static_cast<int>((tokens - 1) % kBlockTokens);
      if (slot == 0) InitBlock(layout_, Block(head, num_blocks - 1));
      WriteTokens(layout_, Block(head, num_blocks - 1), slot, 1, row, row);
    }
    AttentionWork work;
    work.shape = shape_;
    work.heads = kHeads;
    work.num_queries = std::min(queries, tokens);
    work.first_position = tokens - work.num_queries;
    work.num_keys = tokens;
    work.blocks = table_.data();
    work.num_blocks = num_blocks;
    work.q = row.data;
    work.out = reinterpret_cast<std::byte*>(out_.data());
    empty_rows_ += FindEmptyRow(work) >= 0;
    non_finite_ += FindNonFinite(work.q, DType::kF32, kMaxHeadDim) >= 0;
    batch->Clear();
    batch->Add(work);
    const int tasks = batch->Plan();
    for (int task = 0; task < tasks; ++task) batch->Run(task, task % kThreads);
    overflows_ += batch->result(0).overflow_row >= 0;
  }

  int64_t problems() const { return empty_rows_ + non_finite_ + overflows_; }
  static constexpr int kThreads = 2;

 private:
  static constexpr int kBlocks = kMaxTokens / kBlockTokens, kMaxQueries = 64;
  std::byte* Block(int head, int64_t index) const {
    return memory_.As<std::byte>() + (head * kBlocks + index) * layout_.block_bytes;
  }

  const KvShape shape_;
  const BlockLayout layout_;
  const AlignedBuffer memory_;
  const std::vector<float> rows_;
  std::vector<float> out_;
  std::vector<const std::byte*> table_;
  int64_t empty_rows_ = 0, non_finite_ = 0, overflows_ = 0;
};

class SteadyPath : public ::testing::TestWithParam<KvDType> {
 protected:
  KvShape shape() const { return {128, 128, GetParam()}; }
  // Contexts of all sizes, in growing steps, and then the last few tokens.
  static void Grow(Sequence* sequence, AttentionBatch* batch, int64_t queries, int64_t steps_per_doubling) {
    for (int64_t tokens = 1; tokens <= kMaxTokens; tokens += 1 + tokens / steps_per_doubling) {
      sequence->Step(batch, tokens, queries);
    }
    for (int64_t tokens = kMaxTokens - 5; tokens <= kMaxTokens; ++tokens) sequence->Step(batch, tokens, queries);
  }
  static void ExpectNothing(const CallCounts& calls) {
    EXPECT_EQ(calls.allocations, 0);
    EXPECT_EQ(calls.pthread_locks, 0);
    EXPECT_EQ(calls.executable_pages, 0);
    EXPECT_EQ(calls.onednn_creations, 0);
  }
};

// Otherwise zeros would mean nothing.
TEST_P(SteadyPath, TheFirstStepIsCounted) {
  const CallCounts before = CountedCalls();
  AttentionBatch batch(Sequence::kThreads);
  // A shape that no other test has, so that its kernels are not there yet.
  const int dim = 96 + 8 * static_cast<int>(GetParam());
  Sequence sequence({dim, dim, GetParam()});
  sequence.Step(&batch, 100, 1);
  const CallCounts calls = CountedCalls() - before;
  EXPECT_GT(calls.allocations, 0);
  EXPECT_GT(calls.pthread_locks, 0);
  const bool has_ukernels = MaxIsaLevel() != IsaLevel::kBaseline && GetParam() != KvDType::kInt8;  // which streams
  EXPECT_EQ(calls.onednn_creations > 0, has_ukernels);
  EXPECT_EQ(calls.executable_pages > 0, has_ukernels);
}

TEST_P(SteadyPath, DecodeAllocatesNothing) {
  constexpr int64_t kQueries = 1;
  Sequence sequence(shape());
  AttentionBatch batch(Sequence::kThreads);
  sequence.Step(&batch, kMaxTokens, kQueries);  // warm-up: the largest
  sequence.Step(&batch, 1, kQueries);
  const CallCounts before = CountedCalls();
  Grow(&sequence, &batch, kQueries, 64);
  const CallCounts calls = CountedCalls() - before;
  ExpectNothing(calls);
  // So few rows stream, unless this machine's ukernel sums in an order that streaming does not know.
  const bool streams = ShapeKernels::Get(shape()).Streams(kQueries * kHeads.group_size());
  EXPECT_EQ(calls.onednn_executions == 0, streams);
  EXPECT_LE(calls.onednn_allocations, streams ? 0 : 2 * calls.onednn_executions);
  EXPECT_EQ(sequence.problems(), 0);
}

// A context that nobody has seen yet makes the batch's memory grow, but not with every run of blocks.
TEST_P(SteadyPath, AGrowingContextAllocatesRarely) {
  Sequence sequence(shape());
  AttentionBatch batch(Sequence::kThreads);
  sequence.Step(&batch, 1, 1);
  const CallCounts before = CountedCalls();
  for (int64_t tokens = 1; tokens <= kMaxTokens; ++tokens) sequence.Step(&batch, tokens, 1);
  const CallCounts calls = CountedCalls() - before;
  // Tasks and partial results, from one run to kMaxTokens / kRunTokens of them: each doubles a few times.
  EXPECT_LE(calls.allocations, 8);
  EXPECT_EQ(calls.pthread_locks, 0);
  EXPECT_EQ(calls.onednn_creations, 0);
  std::printf("allocations in %d steps: %lld\n", kMaxTokens, static_cast<long long>(calls.allocations));
}

// More rows than streaming serves go to the ukernel, which allocates in oneDNN before 3.11; we do not.
TEST_P(SteadyPath, ManyRowsAllocateNothingOfOurs) {
  constexpr int64_t kQueries = 64;  // enough for whole tiles
  Sequence sequence(shape());
  AttentionBatch batch(Sequence::kThreads);
  sequence.Step(&batch, kMaxTokens, kQueries);
  sequence.Step(&batch, kQueries, kQueries);
  const CallCounts before = CountedCalls();
  Grow(&sequence, &batch, kQueries, 8);
  const CallCounts calls = CountedCalls() - before;
  ExpectNothing(calls);
  const ShapeKernels& kernels = ShapeKernels::Get(shape());
  EXPECT_EQ(calls.onednn_executions == 0, kernels.Streams(kMaxTileRows));
  // Two at most: a vector of the batch, and N scales up to 3.9.
  EXPECT_LE(calls.onednn_allocations, 2 * calls.onednn_executions);
  std::printf("oneDNN: %lld allocations in %lld executions\n", static_cast<long long>(calls.onednn_allocations),
              static_cast<long long>(calls.onednn_executions));
  EXPECT_EQ(sequence.problems(), 0);
}

std::string NameOf(const ::testing::TestParamInfo<KvDType>& info) {
  constexpr std::array<const char*, 4> kNames = {"f32", "bf16", "f16", "int8"};
  return kNames[static_cast<size_t>(info.param)];
}
INSTANTIATE_TEST_SUITE_P(Kv, SteadyPath,
                         ::testing::Values(KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8), NameOf);

}  // namespace
}  // namespace attnd::testing

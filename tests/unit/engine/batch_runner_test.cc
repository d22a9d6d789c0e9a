// What a batch is estimated to cost: the chunk budget divides it by the time that the batch took.
#include "server/engine/batch_runner.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

namespace attnd {
namespace {

// A backward call with every dim 1 and three query heads to one kv head: 21 queries and a third make a tile.
class GradientCall {
 public:
  GradientCall(int64_t queries, int64_t keys, bool causal)
      : layout_(KvShape{1, 1, KvDType::kF32}),
        rows_(3 * queries),
        keys_(keys),
        d_q_(3 * queries),
        d_k_(keys),
        d_v_(keys) {
    run_.num_tokens = queries;
    run_.layout = &layout_;
    run_.heads = {3, 1};
    run_.softmax.causal = causal;
    run_.q = {reinterpret_cast<const std::byte*>(rows_.data()), DType::kF32, 3, 1};
    run_.k = run_.v = {reinterpret_cast<const std::byte*>(keys_.data()), DType::kF32, 1, 1};
    run_.kv_rows = run_.num_keys = keys;
    run_.backward = &backward_;
    BackwardWork& work = backward_.work;
    work.heads = run_.heads;
    work.head_dim = work.value_dim = 1;
    work.softmax = run_.softmax;
    work.num_queries = queries;
    work.num_keys = keys;
    work.q = work.d_out = {run_.q.data, DType::kF32};
    work.k = work.v = {run_.k.data, DType::kF32};
    work.d_q = d_q_.data(), work.d_k = d_k_.data(), work.d_v = d_v_.data();
    backward_.d_out = run_.q;
    memory_.resize(BackwardMemoryBytes(work));
    UseMemory(memory_.data(), &work);
  }
  GradientCall(const GradientCall&) = delete;

  double EstimateOf(BatchRunner* runner, int64_t begin, int64_t end) {
    const ChunkWork chunk{&run_, begin, end};
    runner->Run({&chunk, 1});
    EXPECT_TRUE(run_.status.ok()) << run_.status;
    return runner->estimated_us();
  }

 private:
  const BlockLayout layout_;
  const std::vector<float> rows_, keys_;
  std::vector<float> d_q_, d_k_, d_v_;
  std::vector<std::byte> memory_;
  BackwardRun backward_;
  SegmentRun run_;
};

TEST(BatchRunner, AChunkThatEndsNoTileOfGradientsCostsNothing) {
  BatchRunner runner(1, nullptr);
  GradientCall in_chunks(64, 128, false), whole(64, 128, false);
  EXPECT_EQ(in_chunks.EstimateOf(&runner, 0, 21), 0);
  const double two = in_chunks.EstimateOf(&runner, 21, 43), last = in_chunks.EstimateOf(&runner, 43, 64);
  EXPECT_GT(two, last / 2);
  EXPECT_DOUBLE_EQ(two + last, whole.EstimateOf(&runner, 0, 64));
}

TEST(BatchRunner, CausalGradientsCostTheKeysThatTheirRowsSee) {
  BatchRunner runner(1, nullptr);
  GradientCall causal(1024, 1024, true), all(1024, 1024, false);
  const double first = causal.EstimateOf(&runner, 0, 64), rest = causal.EstimateOf(&runner, 64, 1024);
  const double of_all = all.EstimateOf(&runner, 0, 1024);
  EXPECT_LT(first, of_all / 1024 * 64 / 8);
  EXPECT_GT(first + rest, of_all / 2);
  EXPECT_LT(first + rest, of_all * 0.55);
}

TEST(BatchRunner, KeysThatRowsSee) {
  SoftmaxOptions softmax;
  softmax.causal = false;
  EXPECT_EQ(VisibleKeys(softmax, 0, 10, 1000), 1000);
  softmax.causal = true;
  EXPECT_EQ(VisibleKeys(softmax, 0, 10, 1000), 10);
  EXPECT_EQ(VisibleKeys(softmax, 500, 10, 1000), 510);
  EXPECT_EQ(VisibleKeys(softmax, 5000, 10, 1000), 1000);
  EXPECT_EQ(VisibleKeys(softmax, -50, 10, 1000), 0);
  softmax.window = 100;
  EXPECT_EQ(VisibleKeys(softmax, 500, 10, 1000), 109);
  EXPECT_EQ(VisibleKeys(softmax, 20, 10, 1000), 30);
}

}  // namespace
}  // namespace attnd

// An answer's bits depend on its own numbers only: not on threads, the order of tasks, batch mates, nor on how the
// queries are cut into works.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/unit/kernels/harness.h"

namespace attnd::testing {
namespace {

class BitsTest : public ::testing::TestWithParam<KvDType> {
 protected:
  Problem Make(int head_dim, int value_dim, HeadCounts heads, int64_t queries, int64_t keys) const {
    Problem problem;
    problem.shape = {head_dim, value_dim, GetParam()};
    problem.heads = heads;
    return problem.Lengths(queries, keys).Fill(static_cast<unsigned>(head_dim + queries));
  }
};

TEST_P(BitsTest, TokenByTokenIsPrefillIsChunks) {
  for (const HeadCounts heads : {HeadCounts{4, 1}, HeadCounts{7, 1}, HeadCounts{2, 2}, HeadCounts{16, 1}}) {
    const Problem problem = Make(64, 64, heads, 90, 700);
    const Blocks blocks(problem);
    const Answer prefill = Attend(problem, blocks);
    for (const std::vector<int64_t>& chunks :
         {std::vector<int64_t>{1}, {2}, {3, 1, 5}, {8}, {9}, {16, 1, 31}, {32}, {33}, {64, 26}, {89, 1}}) {
      How how;
      how.chunks = chunks;
      ExpectSameBits(prefill, Attend(problem, blocks, how), "chunks from " + std::to_string(chunks[0]));
    }
  }
}

// From the very first token, over run edges, and in shapes with tails of every kind.
TEST_P(BitsTest, WholeHistoryTokenByToken) {
  for (const auto& [head_dim, value_dim] : {std::pair{128, 128}, {33, 80}, {80, 65}, {17, 7}, {1, 1}, {256, 130}}) {
    const Problem problem = Make(head_dim, value_dim, {3, 1}, kRunTokens + 70, kRunTokens + 70);
    const Blocks blocks(problem);
    How how;
    how.chunks = {1};
    ExpectSameBits(Attend(problem, blocks), Attend(problem, blocks, how), problem.Describe());
    how.chunks = {13};
    ExpectSameBits(Attend(problem, blocks), Attend(problem, blocks, how), problem.Describe());
  }
}

// Products down among the denormals, which bf16 instructions flush to zero and f32 ones do not.
TEST_P(BitsTest, TinyWeightsAndValues) {
  Problem problem = Make(64, 64, {4, 1}, 40, 200);
  problem.softmax.softmax_scale = 1.5f;  // weights down to e^-80
  for (size_t i = 0; i < problem.v.size(); ++i) problem.v[i] *= i % 3 == 0 ? 1e-38f : 1e-20f;
  for (size_t i = 0; i < problem.q.size(); i += 5) problem.q[i] *= 1e-38f;
  for (size_t i = 0; i < problem.k.size(); i += 7) problem.k[i] *= 1e-38f;
  const Blocks blocks(problem);
  How how;
  how.chunks = {1};
  ExpectSameBits(Attend(problem, blocks), Attend(problem, blocks, how), "tiny weights and values");
}

TEST_P(BitsTest, WithWindowSinksAndAlibi) {
  const std::vector<float> slopes = {0.3f, 0.1f, 0.0f, 0.05f}, sinks = {0.1f, 2.0f, -3.0f, 1.0f};
  for (const int64_t window : {0, 5, 64, 300, 513}) {
    Problem problem = Make(64, 64, {4, 2}, 600, 600);
    problem.softmax.window = window;
    problem.softmax.alibi_slopes = slopes.data();
    problem.softmax.sinks = sinks.data();
    problem.softmax.softcap = 10.0f;
    const Blocks blocks(problem);
    const Answer prefill = Attend(problem, blocks);
    for (const int64_t chunk : {1, 7, 64}) {
      How how;
      how.chunks = {chunk};
      ExpectSameBits(prefill, Attend(problem, blocks, how), problem.Describe());
    }
  }
}

TEST_P(BitsTest, ThreadsAndTaskOrder) {
  for (const int64_t queries : {1, 2, 40, 300}) {
    const Problem problem = Make(64, 48, {8, 2}, queries, 1500);
    const Blocks blocks(problem);
    const Answer alone = Attend(problem, blocks);
    for (const int threads : {1, 2, 5, 16}) {
      for (const unsigned order : {0, 1, 2}) {
        How how;
        how.threads = threads;
        how.task_order = order;
        how.real_threads = order == 2 && threads <= 5;
        ExpectSameBits(alone, Attend(problem, blocks, how), "threads " + std::to_string(threads));
      }
    }
  }
}

TEST_P(BitsTest, AloneOrAmong32Others) {
  const Problem mine = Make(64, 64, {4, 1}, 3, 900);
  const Blocks my_blocks(mine);
  const Answer alone = Attend(mine, my_blocks);
  std::vector<Problem> others;
  std::vector<Blocks> other_blocks;
  for (int i = 0; i < 32; ++i) {
    others.push_back(Make(64, 64, {4, 1}, 1 + i % 20, 30 + 50 * i));
    other_blocks.emplace_back(others.back(), i);
  }
  std::vector<std::vector<float>> outs(33, std::vector<float>(20 * 4 * 64));
  AttentionBatch batch(3);
  const auto add = [&](const Problem& problem, const Blocks& blocks, int slot) {
    return batch.Add(MakeWork(problem, blocks, reinterpret_cast<const std::byte*>(problem.q.data()),
                              reinterpret_cast<std::byte*>(outs[slot].data()), nullptr));
  };
  for (const unsigned order : {0, 3}) {
    batch.Clear();
    for (int i = 0; i < 32; ++i) {
      if (i == 17) add(mine, my_blocks, 32);
      add(others[i], other_blocks[i], i);
    }
    How how;
    how.threads = 3;
    how.task_order = order;
    RunTasks(&batch, how);
    Answer among;
    among.out.assign(outs[32].begin(), outs[32].begin() + alone.out.size());
    among.lse = alone.lse;
    ExpectSameBits(alone, among, "among others");
    EXPECT_EQ(batch.result(17).overflow_row, -1);
    for (int i = 0; i < 32; ++i) {
      Answer other = Attend(others[i], other_blocks[i]);
      other.out.resize(alone.out.size() < other.out.size() ? alone.out.size() : other.out.size());
      EXPECT_TRUE(std::equal(other.out.begin(), other.out.end(), outs[i].begin())) << "other " << i;
    }
  }
}

// Forks of one sequence: the same blocks up to some length, then their own.
TEST_P(BitsTest, ForksShareBlocks) {
  struct Fork {
    int64_t shared_tokens, queries, keys;
  };
  // Two runs and a block that is theirs only in part; a few rows, and more than streaming serves. The last one shares
  // less, and must not cost the others what they share.
  const std::vector<Fork> kForks = {{1100, 1, 1500}, {1100, 2, 1350}, {1100, 3, 1200}, {1100, 20, 1180}, {600, 1, 700}};
  for (const int64_t window : {0, 700}) {
    const Problem parent = Make(64, 64, {8, 2}, 1, 1500);
    const Blocks parent_blocks(parent);
    std::vector<Problem> forks;
    std::vector<Answer> alone;
    std::vector<Blocks> own_blocks;
    std::vector<std::vector<const std::byte*>> tables;
    for (const Fork& f : kForks) {
      Problem fork = parent;
      fork.softmax.window = window;
      fork.Lengths(f.queries, f.keys).Fill(static_cast<unsigned>(f.keys));
      std::copy_n(parent.k.begin(), f.shared_tokens * 2 * 64, fork.k.begin());
      std::copy_n(parent.v.begin(), f.shared_tokens * 2 * 64, fork.v.begin());
      own_blocks.emplace_back(fork, static_cast<unsigned>(f.keys));
      const int64_t blocks = own_blocks.back().num_blocks();
      std::vector<const std::byte*> table(own_blocks.back().table(), own_blocks.back().table() + 2 * blocks);
      for (int h = 0; h < 2; ++h) {
        std::copy_n(parent_blocks.table() + h * parent_blocks.num_blocks(), f.shared_tokens / kBlockTokens,
                    &table[h * blocks]);
      }
      alone.push_back(Attend(fork, own_blocks.back()));
      forks.push_back(fork);
      tables.push_back(table);
    }
    for (const int threads : {1, 3}) {
      AttentionBatch batch(threads);
      std::vector<Answer> together(forks.size());
      int64_t bytes_alone = 0;
      for (size_t f = 0; f < forks.size(); ++f) {
        together[f].out.resize(alone[f].out.size());
        together[f].lse.resize(alone[f].lse.size());
        AttentionWork work = MakeWork(forks[f], own_blocks[f], reinterpret_cast<const std::byte*>(forks[f].q.data()),
                                      reinterpret_cast<std::byte*>(together[f].out.data()), together[f].lse.data());
        work.blocks = tables[f].data();
        batch.Add(work);
        AttentionBatch single(threads);
        single.Add(work);
        single.Plan();
        bytes_alone += single.kv_bytes_read();
      }
      How how;
      how.threads = threads;
      how.task_order = threads;
      RunTasks(&batch, how);
      for (size_t f = 0; f < forks.size(); ++f) ExpectSameBits(alone[f], together[f], "fork " + std::to_string(f));
      // Two runs of two heads are read once instead of four times; by more threads three times, for the one of 80 rows
      // is several tiles then and stays by itself. (Windows begin at different blocks.)
      const int64_t block_bytes = static_cast<int64_t>(BlockLayout(parent.shape).block_bytes);
      const int64_t saved = bytes_alone - batch.kv_bytes_read(), readers = threads == 1 ? 4 : 3;
      const int64_t expected = (readers - 1) * 2 * 2 * kRunBlocks * block_bytes;
      EXPECT_TRUE(window != 0 || saved == expected) << saved << " not " << expected << ", " << threads << " threads";
    }
  }
}

// A batch is used again and again: nothing of one round may show in the next.
TEST_P(BitsTest, BatchIsReusable) {
  AttentionBatch batch(2);
  for (int round = 0; round < 6; ++round) {
    const Problem problem = Make(32, 32, {4, 1}, round % 2 == 0 ? 1 : 50, 200 + 300 * round);
    const Blocks blocks(problem);
    std::vector<float> out(problem.num_queries * 4 * 32);
    Answer again;
    again.lse.resize(problem.num_queries * 4);
    batch.Clear();
    batch.Add(MakeWork(problem, blocks, reinterpret_cast<const std::byte*>(problem.q.data()),
                       reinterpret_cast<std::byte*>(out.data()), again.lse.data()));
    How how;
    how.threads = 2;
    RunTasks(&batch, how);
    again.out = out;
    ExpectSameBits(Attend(problem, blocks), again, "round " + std::to_string(round));
  }
}

// Blocks that no row sees may be absent; future keys and what lies before a window change no bit.
TEST_P(BitsTest, InvisibleBlocksMayBeAbsent) {
  Problem problem = Make(32, 32, {4, 1}, 2, 1000);
  problem.softmax.window = 300;  // keys 699..999
  Blocks blocks(problem);
  const Answer whole = Attend(problem, blocks);
  for (int64_t b = 0; b < 699 / kBlockTokens; ++b) blocks.Drop(0, b);
  ExpectSameBits(whole, Attend(problem, blocks), "dropped blocks before the window");
}

TEST_P(BitsTest, BlocksHiddenByTheMaskMayBeAbsent) {
  Problem problem = Make(32, 32, {4, 1}, 2, 1000);
  problem.softmax.causal = false;
  std::vector<uint8_t> bits(2 * 1000 / 8, 0xFF);
  const auto hide = [&](int64_t begin, int64_t end) {
    for (int64_t bit = 0; bit < 2000; ++bit) {
      if (bit % 1000 >= begin && bit % 1000 < end) bits[bit / 8] &= ~(1 << (bit % 8));
    }
  };
  hide(64, 192);   // blocks 1 and 2
  hide(512, 999);  // the second run, but for its last key
  problem.mask = {bits.data(), 1000, 0, 0};
  Blocks blocks(problem);
  const Answer whole = Attend(problem, blocks);
  ExpectRight(problem, whole);
  for (const int64_t b : {1, 2, 8, 9, 10, 11, 12, 13, 14}) blocks.Drop(0, b);
  ExpectSameBits(whole, Attend(problem, blocks), "dropped blocks");
}

TEST_P(BitsTest, FutureRowsDoNotInterfere) {
  Problem problem = Make(32, 32, {4, 1}, 300, 300);
  const Answer before = Attend(problem);
  for (int64_t key = 200; key < 300; ++key) {
    for (int d = 0; d < 32; ++d) {
      problem.k[key * 32 + d] += 1.0f;
      problem.v[key * 32 + d] -= 7.0f;
    }
  }
  Answer after = Attend(problem);
  const size_t rows = 200 * 4;
  EXPECT_TRUE(std::equal(before.out.begin(), before.out.begin() + rows * 32, after.out.begin()));
  EXPECT_TRUE(std::equal(before.lse.begin(), before.lse.begin() + rows, after.lse.begin()));
}

INSTANTIATE_TEST_SUITE_P(Kv, BitsTest, AllKvDTypes(), KvParamName);

}  // namespace
}  // namespace attnd::testing

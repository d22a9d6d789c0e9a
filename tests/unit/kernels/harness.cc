#include "tests/unit/kernels/harness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>
#include <thread>

#include "kernels/append.h"
#include "kernels/convert.h"

namespace attnd::testing {
namespace {

std::vector<std::byte> Narrow(const std::vector<float>& values, DType dtype, size_t margin) {
  std::vector<std::byte> bytes(margin + values.size() * DTypeBytes(dtype));
  NarrowRow(values.data(), static_cast<int>(values.size()), dtype, bytes.data() + margin);
  return bytes;
}

std::vector<double> Widened(const std::vector<float>& values) { return {values.begin(), values.end()}; }

std::vector<int> TaskOrder(int tasks, unsigned seed) {
  std::vector<int> order(tasks);
  std::iota(order.begin(), order.end(), 0);
  if (seed != 0) std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  return order;
}

}  // namespace

// The contract, but for INT8: it allows 3e-2, where rounding Q and the weights to 16 bits costs a hundredth of that.
double RowTolerance(KvDType dtype) { return dtype == KvDType::kF32 ? 1e-5 : dtype == KvDType::kInt8 ? 2e-3 : 1e-2; }

float Rounded(float value, DType dtype) {
  std::byte bytes[4];
  NarrowRow(&value, 1, dtype, bytes);
  WidenRow(bytes, dtype, 1, &value);
  return value;
}

std::vector<float> Stored(const std::vector<float>& values, int dim, KvDType dtype) {
  std::vector<float> stored = values;
  if (dtype == KvDType::kBf16 || dtype == KvDType::kF16) {
    for (float& x : stored) x = Rounded(x, dtype == KvDType::kBf16 ? DType::kBf16 : DType::kF16);
  }
  if (dtype != KvDType::kInt8) return stored;
  for (size_t row = 0; row < stored.size(); row += dim) {
    float largest = 0;
    for (int i = 0; i < dim; ++i) largest = std::max(largest, std::fabs(stored[row + i]));
    const bool vanishes = largest < 127 * std::numeric_limits<float>::min();
    for (int i = 0; i < dim; ++i) {
      float& x = stored[row + i];
      x = vanishes ? 0.0f : largest / 127.0f * std::nearbyint(x * (127.0f / largest));
    }
  }
  return stored;
}

const char* Name(KvDType dtype) {
  return dtype == KvDType::kF32 ? "F32" : dtype == KvDType::kBf16 ? "Bf16" : dtype == KvDType::kF16 ? "F16" : "Int8";
}

Problem& Problem::Lengths(int64_t queries, int64_t keys) {
  num_queries = queries;
  num_keys = keys;
  first_position = keys - queries;
  return *this;
}

Problem& Problem::Fill(unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> positive(0.5f, 1.5f);
  if (softmax.softmax_scale == 1.0f) softmax.softmax_scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  q.resize(num_queries * heads.num_q_heads * shape.head_dim);
  k.resize(num_keys * heads.num_kv_heads * shape.head_dim);
  v.resize(num_keys * heads.num_kv_heads * shape.value_dim);
  for (float& x : q) x = Rounded(normal(random), q_dtype);
  for (float& x : k) x = normal(random);
  for (float& x : v) x = shape.value_dim >= 16 ? normal(random) : positive(random);
  return *this;
}

std::string Problem::Describe() const {
  std::ostringstream text;
  text << Name(shape.dtype) << " head_dim " << shape.head_dim << " value_dim " << shape.value_dim << " heads "
       << heads.num_q_heads << "/" << heads.num_kv_heads << " queries " << num_queries << " keys " << num_keys
       << " first " << first_position << " scale " << softmax.softmax_scale << " cap " << softmax.softcap << " causal "
       << softmax.causal << " window " << softmax.window << " alibi " << (softmax.alibi_slopes != nullptr) << " sinks "
       << (softmax.sinks != nullptr) << " mask " << (mask.bits != nullptr);
  return text.str();
}

Blocks::Blocks(const Problem& p, unsigned seed) : num_blocks_((p.num_keys + kBlockTokens - 1) / kBlockTokens) {
  const BlockLayout layout(p.shape);
  const int heads = p.heads.num_kv_heads;
  const int64_t count = num_blocks_ * heads;
  memory_.Reserve(std::max<size_t>(64, count * layout.block_bytes));
  std::fill_n(memory_.As<uint32_t>(), memory_.bytes() / 4, 0x7FC07FC0u);  // NaN as f32 and as bf16
  std::vector<int> places = TaskOrder(static_cast<int>(count), seed);
  for (int h = 0; h < heads; ++h) {
    for (int64_t b = 0; b < num_blocks_; ++b) {
      std::byte* block = memory_.As<std::byte>() + places[h * num_blocks_ + b] * layout.block_bytes;
      const int64_t first = b * kBlockTokens;
      const int tokens = static_cast<int>(std::min<int64_t>(kBlockTokens, p.num_keys - first));
      const size_t k_row = heads * p.shape.head_dim, v_row = heads * p.shape.value_dim;
      InitBlock(layout, block);
      WriteTokens(layout, block, 0, tokens,
                  {reinterpret_cast<const std::byte*>(&p.k[first * k_row + h * p.shape.head_dim]), k_row * 4},
                  {reinterpret_cast<const std::byte*>(&p.v[first * v_row + h * p.shape.value_dim]), v_row * 4});
      table_.push_back(block);
    }
  }
}

AttentionWork MakeWork(const Problem& p, const Blocks& blocks, const std::byte* q, std::byte* out, float* lse) {
  AttentionWork work;
  work.shape = p.shape;
  work.heads = p.heads;
  work.softmax = p.softmax;
  work.mask = p.mask;
  work.num_queries = p.num_queries;
  work.first_position = p.first_position;
  work.num_keys = p.num_keys;
  work.blocks = blocks.table();
  work.num_blocks = blocks.num_blocks();
  work.q = q;
  work.q_dtype = p.q_dtype;
  work.out = out;
  work.out_dtype = p.out_dtype;
  work.lse = lse;
  return work;
}

void RunTasks(AttentionBatch* batch, const How& how) {
  const std::vector<int> order = TaskOrder(batch->Plan(), how.task_order);
  if (!how.real_threads) {
    for (size_t i = 0; i < order.size(); ++i) batch->Run(order[i], static_cast<int>(i % how.threads));
    return;
  }
  std::atomic<size_t> next{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < how.threads; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i; (i = next.fetch_add(1)) < order.size();) batch->Run(order[i], t);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

Answer Attend(const Problem& p, const Blocks& blocks, const How& how) {
  const size_t margin = how.misaligned ? 3 : 0;
  const std::vector<std::byte> q = Narrow(p.q, p.q_dtype, margin);
  const int64_t rows = p.num_queries * p.heads.num_q_heads;
  std::vector<std::byte> out(margin + rows * p.shape.value_dim * DTypeBytes(p.out_dtype), std::byte{0xFF});
  Answer answer;
  answer.lse.assign(rows, kNaN);
  if (how.weights) answer.weights.assign(rows * p.num_keys, kNaN);

  std::vector<int64_t> chunks = how.chunks;
  if (chunks.empty()) chunks = {p.num_queries};
  // A chunk of a session sees the keys up to its own last token: its tables are shorter.
  std::vector<std::vector<const std::byte*>> tables;
  std::vector<AttentionWork> works;
  int64_t first = 0;
  for (size_t c = 0; first < p.num_queries; ++c) {
    const int64_t count = std::min(chunks[std::min(c, chunks.size() - 1)], p.num_queries - first);
    AttentionWork work = MakeWork(p, blocks, nullptr, nullptr, nullptr);
    const int64_t q_row = p.heads.num_q_heads * p.shape.head_dim * static_cast<int64_t>(DTypeBytes(p.q_dtype));
    const int64_t out_row = p.heads.num_q_heads * p.shape.value_dim * static_cast<int64_t>(DTypeBytes(p.out_dtype));
    work.q = q.data() + margin + first * q_row;
    work.out = out.data() + margin + first * out_row;
    work.lse = answer.lse.data() + first * p.heads.num_q_heads;
    if (how.weights) work.weights = answer.weights.data();
    work.num_queries = count;
    work.first_position = p.first_position + first;
    work.mask.first_row = p.mask.first_row + first;
    if (p.softmax.causal && !how.chunks.empty()) {
      work.num_keys = std::clamp<int64_t>(work.first_position + count + how.visible_beyond, 0, p.num_keys);
      work.num_blocks = (work.num_keys + kBlockTokens - 1) / kBlockTokens;
      std::vector<const std::byte*>& table = tables.emplace_back();
      for (int h = 0; h < p.heads.num_kv_heads; ++h) {
        const auto begin = blocks.table() + h * blocks.num_blocks();
        table.insert(table.end(), begin, begin + work.num_blocks);
      }
    }
    works.push_back(work);
    first += count;
  }
  for (size_t c = 0; c < tables.size(); ++c) works[c].blocks = tables[c].data();
  AttentionBatch batch(how.threads);
  for (const AttentionWork& work : works) batch.Add(work);
  RunTasks(&batch, how);
  if (!works.empty()) answer.result = batch.result(0);
  answer.out.resize(rows * p.shape.value_dim);
  WidenRow(out.data() + margin, p.out_dtype, static_cast<int>(answer.out.size()), answer.out.data());
  return answer;
}

Answer Attend(const Problem& problem, const How& how) { return Attend(problem, Blocks(problem), how); }

ReferenceOutput Expected(const Problem& p) {
  // What the kernels multiply: K and V as stored, and Q is rounded to bf16 for bf16 KV.
  const KvDType q = p.shape.dtype == KvDType::kBf16 ? KvDType::kBf16 : KvDType::kF32;
  return ReferenceAttention({p.heads, p.shape.head_dim, p.shape.value_dim, p.softmax, p.mask, p.first_position,
                             Widened(Stored(p.q, p.shape.head_dim, q)),
                             Widened(Stored(p.k, p.shape.head_dim, p.shape.dtype)),
                             Widened(Stored(p.v, p.shape.value_dim, p.shape.dtype))});
}

void ExpectRight(const Problem& p, const Answer& answer, double tolerance_factor) {
  const ReferenceOutput expected = Expected(p);
  // Rounding the answer itself costs half an ulp of its type.
  const double out_epsilon = p.out_dtype == DType::kF32 ? 0 : p.out_dtype == DType::kBf16 ? 0x1p-8 : 0x1p-11;
  const double tolerance = RowTolerance(p.shape.dtype) * tolerance_factor + out_epsilon;
  const int64_t dim = p.shape.value_dim, rows = p.num_queries * p.heads.num_q_heads;
  for (int64_t row = 0; row < rows; ++row) {
    double error = 0, norm = 0;
    for (int64_t c = row * dim; c < (row + 1) * dim; ++c) {
      error += std::pow(answer.out[c] - expected.out[c], 2);
      norm += std::pow(expected.out[c], 2);
    }
    ASSERT_LE(std::sqrt(error), tolerance * std::sqrt(norm)) << "row " << row << " of " << p.Describe();
    const double lse = expected.lse[row];
    if (std::isinf(lse)) {
      ASSERT_EQ(answer.lse[row], lse) << "row " << row << " of " << p.Describe();
    } else {
      ASSERT_NEAR(answer.lse[row], lse, tolerance * std::max(1.0, std::fabs(lse)))
          << "row " << row << " of " << p.Describe();
    }
  }
  for (size_t i = 0; i < answer.weights.size(); ++i) {
    ASSERT_NEAR(answer.weights[i], expected.weights[i], RowTolerance(p.shape.dtype) * tolerance_factor)
        << "weight " << i << " of " << p.Describe();
  }
}

void ExpectRight(const Problem& problem, const How& how) {
  const Answer answer = Attend(problem, how);
  EXPECT_EQ(answer.result.overflow_row, -1) << problem.Describe();
  ExpectRight(problem, answer);
}

void ExpectSameBits(const Answer& x, const Answer& y, const std::string& what) {
  ASSERT_EQ(x.out.size(), y.out.size());
  EXPECT_EQ(std::memcmp(x.out.data(), y.out.data(), x.out.size() * sizeof(float)), 0) << "out differs: " << what;
  EXPECT_EQ(std::memcmp(x.lse.data(), y.lse.data(), x.lse.size() * sizeof(float)), 0) << "lse differs: " << what;
}

}  // namespace attnd::testing

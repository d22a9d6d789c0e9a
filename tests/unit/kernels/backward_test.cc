// The gradients: against finite differences of the float64 forward pass, against the float64 reference, and their bits.
#include "kernels/backward.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "kernels/convert.h"
#include "kernels/row_range.h"
#include "tests/unit/kernels/harness.h"

namespace attnd::testing {
namespace {

constexpr double kTolerance = 1e-5;  // of ||gradient - reference|| / ||reference||

std::vector<double> Widened(const std::vector<float>& values) { return {values.begin(), values.end()}; }

// A problem, the gradient of its output, and room for bits and slopes that its options point to.
struct Case {
  Problem problem;
  std::vector<float> d_out;
  std::vector<uint8_t> mask;
  std::vector<float> slopes, sinks;
  DType dtype = DType::kF32;  // of all tensors

  Case(KvShape shape, HeadCounts heads, int64_t queries, int64_t keys) {
    problem.shape = shape;
    problem.heads = heads;
    problem.softmax.causal = false;
    problem.Lengths(queries, keys).Fill(static_cast<unsigned>(queries * 1000 + keys));
    std::mt19937 random(static_cast<unsigned>(keys * 1000 + queries));
    std::normal_distribution<float> normal;
    d_out.resize(queries * heads.num_q_heads * shape.value_dim);
    for (float& x : d_out) x = normal(random);
  }
  void SetMask(unsigned seed, double density) {
    std::mt19937 random(seed);
    std::bernoulli_distribution allowed(density);
    mask.assign((problem.num_queries * problem.num_keys + 7) / 8, 0);
    for (int64_t i = 0; i < problem.num_queries * problem.num_keys; ++i) mask[i / 8] |= allowed(random) << (i % 8);
    problem.mask = {mask.data(), problem.num_keys, 0, 0};
  }
  void SetSlopes() {
    for (int h = 0; h < problem.heads.num_q_heads; ++h) slopes.push_back(0.3f / static_cast<float>(1 + h));
    problem.softmax.alibi_slopes = slopes.data();
  }
  void SetSinks() {
    for (int h = 0; h < problem.heads.num_q_heads; ++h) sinks.push_back(static_cast<float>(h % 3) - 0.5f);
    problem.softmax.sinks = sinks.data();
  }
  ReferenceInput Input() const {
    return {problem.heads,          problem.shape.head_dim, problem.shape.value_dim, problem.softmax,   problem.mask,
            problem.first_position, Widened(problem.q),     Widened(problem.k),      Widened(problem.v)};
  }
};

// One option each, at unequal counts and dims.
std::vector<Case> OptionCases(int64_t queries, int64_t keys) {
  std::vector<std::function<void(Case*)>> options = {
      [](Case*) {},
      [](Case* c) { c->problem.softmax.causal = true; },
      [](Case* c) { c->problem.softmax.causal = true, c->problem.first_position = 0; },
      [](Case* c) { c->problem.softmax.window = 5; },
      [](Case* c) { c->problem.softmax.causal = true, c->problem.softmax.window = 3; },
      [](Case* c) { c->problem.softmax.softmax_scale = -0.7f; },
      [](Case* c) { c->problem.softmax.softmax_scale = 0; },
      [](Case* c) { c->problem.softmax.softcap = 1.5f; },
      [](Case* c) { c->SetSlopes(); },
      [](Case* c) { c->SetSinks(); },
      [](Case* c) { c->SetMask(3, 0.6); },
      [](Case* c) {
        c->problem.softmax.causal = true, c->problem.softmax.window = 11, c->problem.softmax.softcap = 3.0f;
        c->SetSlopes(), c->SetSinks(), c->SetMask(4, 0.8);
      },
  };
  std::vector<Case> cases;
  cases.reserve(options.size());  // they point into themselves
  for (const auto& option : options) option(&cases.emplace_back(KvShape{6, 4}, HeadCounts{4, 2}, queries, keys));
  return cases;
}

struct Gradients {
  std::vector<float> d_q, d_k, d_v, d_sinks;
};

struct How {
  int threads = 1;
  std::vector<int64_t> stretches = {};  // queries that are there after each; all come after the last
  bool real_threads = false;
};

std::vector<std::byte> Narrow(const std::vector<float>& values, DType dtype) {
  std::vector<std::byte> bytes(3 + values.size() * DTypeBytes(dtype));  // misaligned
  NarrowRow(values.data(), static_cast<int>(values.size()), dtype, bytes.data() + 3);
  return bytes;
}

void RunBatch(BackwardBatch* batch, const How& how) {
  batch->Plan();
  for (int phase = 0; phase < BackwardBatch::kPhases; ++phase) {
    std::atomic<int> next{0};
    const auto run = [&] {
      for (int task; (task = next.fetch_add(1)) < batch->num_tasks(phase);) batch->Run(phase, task);
    };
    if (!how.real_threads) {
      run();
      continue;
    }
    std::vector<std::thread> threads;
    for (int t = 0; t < how.threads; ++t) threads.emplace_back(run);
    for (std::thread& thread : threads) thread.join();
  }
}

Gradients Differentiate(const Case& c, const How& how = {}) {
  const Problem& p = c.problem;
  const std::vector<std::byte> q = Narrow(p.q, c.dtype), k = Narrow(p.k, c.dtype), v = Narrow(p.v, c.dtype),
                               d_out = Narrow(c.d_out, c.dtype);
  Gradients g;
  g.d_q.assign(p.q.size(), kNaN);
  g.d_k.assign(p.k.size(), 0.0f);
  g.d_v.assign(p.v.size(), 0.0f);
  BackwardWork work;
  work.heads = p.heads;
  work.head_dim = p.shape.head_dim;
  work.value_dim = p.shape.value_dim;
  work.softmax = p.softmax;
  work.mask = p.mask;
  work.num_queries = p.num_queries;
  work.num_keys = p.num_keys;
  work.first_position = p.first_position;
  work.q = {q.data() + 3, c.dtype};
  work.k = {k.data() + 3, c.dtype};
  work.v = {v.data() + 3, c.dtype};
  work.d_out = {d_out.data() + 3, c.dtype};
  work.d_q = g.d_q.data();
  work.d_k = g.d_k.data();
  work.d_v = g.d_v.data();
  std::vector<std::byte> memory(BackwardMemoryBytes(work));
  UseMemory(memory.data(), &work);
  BackwardBatch batch(how.threads);
  std::vector<int64_t> ends = how.stretches;
  ends.push_back(p.num_queries);
  int64_t done = 0;
  for (const int64_t end : ends) {
    const int64_t tiles = BackwardTiles(work, end);
    batch.Clear();
    batch.Add(work, done, tiles);
    RunBatch(&batch, how);
    done = tiles;
  }
  if (p.softmax.sinks != nullptr) {
    for (int h = 0; h < p.heads.num_q_heads; ++h) g.d_sinks.push_back(static_cast<float>(SinkGradient(work, h)));
  }
  return g;
}

void ExpectNear(const std::vector<float>& actual, const std::vector<double>& expected, const char* name,
                const Case& c) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    error += std::pow(actual[i] - expected[i], 2);
    norm += std::pow(expected[i], 2);
  }
  EXPECT_LE(std::sqrt(error), kTolerance * std::sqrt(norm)) << name << " of " << c.problem.Describe();
}

void ExpectRight(const Case& c, const How& how = {}) {
  const Gradients actual = Differentiate(c, how);
  const ReferenceGradients expected = ReferenceBackward(c.Input(), Widened(c.d_out));
  ExpectNear(actual.d_q, expected.d_q, "d_q", c);
  ExpectNear(actual.d_k, expected.d_k, "d_k", c);
  ExpectNear(actual.d_v, expected.d_v, "d_v", c);
  if (c.problem.softmax.sinks != nullptr) ExpectNear(actual.d_sinks, expected.d_sinks, "d_sinks", c);
}

void ExpectSameBits(const Gradients& x, const Gradients& y, const std::string& what) {
  const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
  };
  EXPECT_TRUE(same(x.d_q, y.d_q)) << "d_q: " << what;
  EXPECT_TRUE(same(x.d_k, y.d_k)) << "d_k: " << what;
  EXPECT_TRUE(same(x.d_v, y.d_v)) << "d_v: " << what;
  EXPECT_TRUE(same(x.d_sinks, y.d_sinks)) << "d_sinks: " << what;
}

// sum(d_out * out) of the float64 forward pass.
double Loss(const ReferenceInput& input, const std::vector<double>& d_out) {
  const ReferenceOutput forward = ReferenceAttention(input);
  double loss = 0;
  for (size_t i = 0; i < d_out.size(); ++i) loss += d_out[i] * forward.out[i];
  return loss;
}

// d(loss) / d(*x) by central differences.
double Slope(double* x, const std::function<double()>& loss) {
  constexpr double kStep = 1e-5;
  const double before = *x;
  *x = before + kStep;
  const double above = loss();
  *x = before - kStep;
  const double below = loss();
  *x = before;
  return (above - below) / (2 * kStep);
}

// The specification itself: the formulas against the forward pass, at unequal counts and dims.
TEST(BackwardReference, FiniteDifferences) {
  for (const auto& [queries, keys] : {std::pair{5, 9}, {7, 3}}) {
    for (const Case& c : OptionCases(queries, keys)) {
      ReferenceInput input = c.Input();
      const std::vector<double> d_out = Widened(c.d_out);
      const ReferenceGradients gradients = ReferenceBackward(input, d_out);
      const auto loss = [&] { return Loss(input, d_out); };
      const auto compare = [&](std::vector<double>* x, const std::vector<double>& gradient, const char* name) {
        for (size_t i = 0; i < x->size(); ++i) {
          EXPECT_NEAR(Slope(&(*x)[i], loss), gradient[i], 1e-8) << name << " " << i << " of " << c.problem.Describe();
        }
      };
      compare(&input.q, gradients.d_q, "d_q");
      compare(&input.k, gradients.d_k, "d_k");
      compare(&input.v, gradients.d_v, "d_v");
      // Sinks are f32, so their steps are larger.
      std::vector<float> sinks = c.sinks;
      for (size_t h = 0; h < sinks.size(); ++h) {
        input.softmax.sinks = sinks.data();
        const float before = sinks[h], above = before + 0x1p-10f, below = before - 0x1p-10f;
        sinks[h] = above;
        const double up = loss();
        sinks[h] = below;
        const double slope = (up - loss()) / (double{above} - double{below});
        sinks[h] = before;
        EXPECT_NEAR(slope, gradients.d_sinks[h], 1e-5) << "d_sinks " << h << " of " << c.problem.Describe();
      }
    }
  }
}

// The seed text's numbers: p = (1/4, 3/4) and u = (1, 3) give score gradients (-3/8, 3/8).
TEST(Backward, SeedNumbers) {
  Case c({1, 1}, {1, 1}, 1, 2);
  c.problem.softmax.softmax_scale = 1.0f;
  c.problem.q = {1.0f};  // so that d_k is the scores' gradient
  c.problem.k = {0.0f, std::log(3.0f)};
  c.problem.v = {1.0f, 3.0f};
  c.d_out = {1.0f};
  const Gradients g = Differentiate(c);
  EXPECT_NEAR(g.d_k[0], -0.375f, 1e-7);
  EXPECT_NEAR(g.d_k[1], 0.375f, 1e-7);
  EXPECT_NEAR(g.d_q[0], 0.375f * std::log(3.0f), 1e-7);
  EXPECT_NEAR(g.d_v[0], 0.25f, 1e-7);
  EXPECT_NEAR(g.d_v[1], 0.75f, 1e-7);
}

TEST(Backward, EveryOption) {
  for (const auto& [queries, keys] : {std::pair{5, 9}, {40, 130}, {130, 70}}) {
    for (const Case& c : OptionCases(queries, keys)) ExpectRight(c);
  }
}

TEST(Backward, RandomShapes) {
  std::mt19937 random(17);
  const auto pick = [&random](int n) { return static_cast<int>(random() % n); };
  for (int i = 0; i < 60; ++i) {
    const int kv_heads = 1 + pick(3), group = 1 + pick(5);
    Case c({1 + pick(70), 1 + pick(70)}, {kv_heads * group, kv_heads}, 1 + pick(150), 1 + pick(300));
    if (pick(2) == 0) {
      c.problem.softmax.causal = true;
      c.problem.first_position = pick(300);
    }
    if (pick(3) == 0) c.problem.softmax.window = 1 + pick(400);
    if (pick(3) == 0) c.problem.softmax.softcap = 0.5f + static_cast<float>(pick(5));
    if (pick(3) == 0) c.SetSlopes();
    if (pick(3) == 0) c.SetSinks();
    if (pick(3) == 0) c.SetMask(i, 0.7);
    ExpectRight(c, {.threads = 1 + pick(4)});
  }
}

TEST(Backward, LargeDimsAndGroups) {
  ExpectRight(Case({256, 256}, {2, 1}, 70, 100));
  ExpectRight(Case({64, 128}, {71, 1}, 5, 130));
  ExpectRight(Case({8, 16}, {300, 1}, 2, 70));
}

// More keys than a thread keeps the products of.
TEST(Backward, LongRows) {
  Case c({8, 8}, {2, 1}, 3, 4500);
  ExpectRight(c);
  c.problem.softmax.causal = true;
  c.problem.first_position = 4400;
  ExpectRight(c);
}

// 4096 row tiles with equal parts: plain float32 sums of them are 4e-5 off.
TEST(Backward, ManyRowsAddUp) {
  Case c({3, 2}, {1, 1}, 1 << 18, 1);
  c.SetSinks();
  std::fill(c.problem.q.begin(), c.problem.q.end(), 0.3f);
  std::fill(c.d_out.begin(), c.d_out.end(), 0.1f);
  ExpectRight(c);
}

// A call of few tasks needs no more scratch for having many threads at hand, nor for having many keys.
TEST(Backward, ScratchIsForTheTasksAtWork) {
  const auto scratch_of = [](int threads, int64_t queries, int64_t keys) {
    BackwardWork work;
    work.heads = {1, 1};
    work.head_dim = work.value_dim = 256;
    work.num_queries = queries;
    work.num_keys = keys;
    BackwardBatch batch(threads);
    batch.Add(work, 0, BackwardTiles(work, queries));
    batch.Plan();
    return batch.scratch_bytes();
  };
  EXPECT_EQ(scratch_of(64, 1, 60), scratch_of(1, 1, 60));
  EXPECT_EQ(scratch_of(64, 128, 128), scratch_of(2, 128, 128));
  EXPECT_EQ(scratch_of(1, 1, 1 << 20), scratch_of(1, 1, 1000));
  EXPECT_LE(scratch_of(1, 1, 1 << 20), 3u << 19);
}

TEST(Backward, PairsAreThoseOfTheTilesThatRowsSee) {
  BackwardWork work;
  work.heads = {6, 2};  // 21 queries and a third make a tile
  work.num_queries = 200;
  work.num_keys = 1000;
  work.softmax.causal = false;
  EXPECT_EQ(BackwardTiles(work, 21), 0);
  EXPECT_EQ(BackwardPairs(work, 0, BackwardTiles(work, 21)), 0);
  EXPECT_EQ(BackwardPairs(work, 0, 1), 64 * 1000);
  EXPECT_EQ(BackwardPairs(work, 0, BackwardTiles(work, 200)), 600 * 1000);
  work.softmax.causal = true;  // rows of 22 queries see a tile of keys, those of the last 200
  EXPECT_EQ(BackwardPairs(work, 0, 1), 64 * 64);
  EXPECT_EQ(BackwardPairs(work, 9, 10), 24 * 256);
  work.first_position = 10'000;
  EXPECT_EQ(BackwardPairs(work, 0, 1), 64 * 1000);
  work.first_position = -1000;
  EXPECT_EQ(BackwardPairs(work, 0, 1), 0);
}

TEST(Backward, NarrowTensors) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    Case c({33, 20}, {4, 2}, 30, 70);
    c.dtype = dtype;
    for (std::vector<float>* values : {&c.problem.q, &c.problem.k, &c.problem.v, &c.d_out}) {
      for (float& x : *values) x = Rounded(x, dtype);
    }
    ExpectRight(c);
  }
}

// Scores of +-6e4 beside each other, and weights so near to 1 that D_P and its mean cancel to a millionth.
TEST(Backward, ExtremeScores) {
  for (const float top : {6e4f, -6e4f}) {
    Case c({2, 16}, {2, 1}, 3, 140);
    c.problem.softmax.softmax_scale = 1.0f;
    for (size_t i = 0; i < c.problem.q.size(); i += 2) c.problem.q[i] = 256.0f, c.problem.q[i + 1] = 1.0f;
    for (size_t j = 0; j < c.problem.k.size(); j += 2) {
      c.problem.k[j] = std::trunc(top / 256.0f);
      c.problem.k[j + 1] = static_cast<float>(j % 11) * 1.5f;
    }
    ExpectRight(c);
  }
  Case saturated({2, 16}, {1, 1}, 3, 20);
  saturated.problem.softmax.softmax_scale = 1.0f;
  for (float& q : saturated.problem.q) q = 1.0f;
  for (size_t j = 0; j < saturated.problem.k.size(); ++j)
    saturated.problem.k[j] = j < 2 ? 10.0f : 0.1f * static_cast<float>(j);
  ExpectRight(saturated);
}

// A cap that all scores are far beyond: tanh is 1 to many digits, and its slope small but not 0.
TEST(Backward, SaturatedSoftcap) {
  Case c({4, 8}, {1, 1}, 5, 30);
  c.problem.softmax.softcap = 0.1f;
  c.problem.softmax.softmax_scale = 1.0f;
  for (float& q : c.problem.q) q = 0.5f;
  for (size_t j = 0; j < c.problem.k.size(); ++j) c.problem.k[j] = 0.4f + 0.01f * static_cast<float>(j % 7);
  ExpectRight(c);
}

// A cap that all scores are far below: tanh(z) is z but for its last digits.
TEST(Backward, VastSoftcap) {
  for (const float cap : {30.0f, 1e4f, 1e20f, 3e38f}) {
    Case c({4, 8}, {2, 1}, 5, 30);
    c.problem.softmax.softcap = cap;
    ExpectRight(c);
  }
  Case seed({1, 1}, {1, 1}, 1, 2);
  seed.problem.softmax.softmax_scale = 1.0f;
  seed.problem.softmax.softcap = 1e20f;
  seed.problem.q = {1.0f};
  seed.problem.k = {0.0f, std::log(3.0f)};
  seed.problem.v = {1.0f, 3.0f};
  seed.d_out = {1.0f};
  const Gradients g = Differentiate(seed);
  EXPECT_NEAR(g.d_k[0], -0.375f, 1e-7);
  EXPECT_NEAR(g.d_k[1], 0.375f, 1e-7);
}

TEST(Backward, EmptyRowsHaveNoGradients) {
  for (const bool sinks : {false, true}) {
    Case c({4, 6}, {2, 1}, 6, 5);
    if (sinks) c.SetSinks();
    c.problem.softmax.causal = true;
    c.problem.first_position = -2;  // rows 0 and 1 see nothing
    ExpectRight(c);
    const Gradients g = Differentiate(c);
    for (int i = 0; i < 2 * 2 * 4; ++i) EXPECT_EQ(g.d_q[i], 0.0f);
  }
  Case none({4, 6}, {2, 1}, 3, 5);
  none.SetMask(1, 0.0);
  const Gradients g = Differentiate(none);
  for (const auto* values : {&g.d_q, &g.d_k, &g.d_v}) {
    for (const float x : *values) EXPECT_EQ(x, 0.0f);
  }
}

TEST(Backward, MaskedKeysGetNothing) {
  Case c({4, 6}, {2, 1}, 20, 100);
  c.problem.softmax.window = 10;
  c.problem.softmax.causal = true;
  c.problem.first_position = 50;
  const Gradients g = Differentiate(c);
  for (int key = 0; key < 100; ++key) {
    const bool seen = key > 50 - 10 && key <= 69;
    const auto any = [&](const std::vector<float>& d, int dim) {
      return std::any_of(d.begin() + key * dim, d.begin() + (key + 1) * dim, [](float x) { return x != 0; });
    };
    EXPECT_EQ(any(g.d_k, 4), seen) << key;
    EXPECT_EQ(any(g.d_v, 6), seen) << key;
  }
}

TEST(Backward, BitsDependOnNothingElse) {
  Case c({20, 12}, {6, 2}, 200, 330);
  c.problem.softmax.causal = true;
  c.SetSinks();
  const Gradients expected = Differentiate(c);
  // One thread computes a kv head in one go, and so do two; where that leaves threads idle, row tiles and key tiles go
  // apart.
  for (const int threads : {2, 3, 7, 64}) {
    ExpectSameBits(Differentiate(c, {.threads = threads}), expected, "threads " + std::to_string(threads));
  }
  ExpectSameBits(Differentiate(c, {.threads = 7, .real_threads = true}), expected, "real threads");
  ExpectSameBits(Differentiate(c, {.stretches = {1, 60, 61, 199}}), expected, "stretches");
  ExpectSameBits(Differentiate(c, {.threads = 9, .stretches = {100}}), expected, "stretches and threads");
}

TEST(Backward, BatchMatesChangeNoBit) {
  Case a({20, 12}, {2, 2}, 70, 130), b({7, 33}, {4, 1}, 9, 300);
  const Gradients alone = Differentiate(a);
  Gradients g;
  std::vector<float> unused_q(b.problem.q.size()), unused_k(b.problem.k.size()), unused_v(b.problem.v.size());
  g.d_q.resize(a.problem.q.size()), g.d_k.resize(a.problem.k.size()), g.d_v.resize(a.problem.v.size());
  const auto work_of = [](const Case& c, float* d_q, float* d_k, float* d_v) {
    const auto tensor = [](const std::vector<float>& values) {
      return BackwardTensor{reinterpret_cast<const std::byte*>(values.data()), DType::kF32};
    };
    const Problem& p = c.problem;
    return BackwardWork{p.heads,
                        p.shape.head_dim,
                        p.shape.value_dim,
                        p.softmax,
                        p.mask,
                        p.num_queries,
                        p.num_keys,
                        p.first_position,
                        tensor(p.q),
                        tensor(p.k),
                        tensor(p.v),
                        tensor(c.d_out),
                        d_q,
                        d_k,
                        d_v};
  };
  BackwardWork work_b = work_of(b, unused_q.data(), unused_k.data(), unused_v.data());
  BackwardWork work_a = work_of(a, g.d_q.data(), g.d_k.data(), g.d_v.data());
  std::vector<std::byte> memory_a(BackwardMemoryBytes(work_a)), memory_b(BackwardMemoryBytes(work_b));
  UseMemory(memory_a.data(), &work_a);
  UseMemory(memory_b.data(), &work_b);
  BackwardBatch batch(2);
  batch.Add(work_b, 0, BackwardTiles(work_b, 9));
  batch.Add(work_a, 0, BackwardTiles(work_a, 70));
  RunBatch(&batch, {});
  ExpectSameBits(g, alone, "another work in the batch");
}

}  // namespace
}  // namespace attnd::testing

// What a steady one-token step costs inside the engine, in allocations and locks: bounded here, and printed. The
// kernels' part is none (tests/unit/kernels/steady_path_test.cc); the queue and its mutex are the engine's design.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "server/engine/engine.h"
#include "tests/unit/call_counts.h"
#include "tests/unit/engine/engine_harness.h"

namespace attnd {
namespace {

using testing::CallCounts;
using testing::CountedCalls;

#if defined(ATTND_COUNT_ABSL_LOCKS)
constexpr bool kCountsAbslLocks = true;
#else
constexpr bool kCountsAbslLocks = false;
#endif

// Of one step: 10 with GCC's library, and room for another one's habits.
constexpr double kMaxAllocations = 12;
// Submission, forming the batch, committing it. (Counting begins and ends while the compute thread is on its way.)
constexpr double kMaxEngineLocks = 3.05;

struct Model {
  const char* name;
  HeadCounts heads;
  int head_dim;
  int64_t context;  // at the first step
  int threads;
};

SessionConfig ConfigOf(const Model& model, KvDType kv) {
  SessionConfig config;
  config.num_layers = 1;
  config.heads = model.heads;
  config.shape = {model.head_dim, model.head_dim, kv};
  return config;
}

// Counts of `steps` one-token steps of one session, each submitted when the one before is answered. The steps are made
// and their answers' memory is there before counting begins: what is left is the engine's.
CallCounts CountSteps(const Model& model, KvDType kv, int steps) {
  EngineOptions options = Harness::DefaultOptions();
  options.compute_threads = model.threads;
  options.poison_cache = false;
  options.kv_cache_bytes = int64_t{256} << 20;
  EngineObserver observer;
  std::unique_ptr<Engine> engine = *Engine::Create(options, &observer);
  std::string id;
  std::atomic<int> done{0}, failed{0};
  engine->CreateSession(ConfigOf(model, kv), [&](absl::StatusOr<SessionInfo> info) {
    id = info->session_id;
    done.store(1);
  });
  const auto await = [&](int count) {
    while (done.load() < count) std::this_thread::yield();
  };
  await(1);
  const size_t q_floats = size_t(model.heads.num_q_heads) * model.head_dim;
  const size_t kv_floats = size_t(model.heads.num_kv_heads) * model.head_dim;
  const std::vector<float> rows(std::max<size_t>(q_floats, kv_floats * model.context), 0.25f);
  std::vector<float> out(q_floats);
  const auto make_step = [&](int64_t tokens) {
    StepTask step;
    step.segments.emplace_back();
    step.segments[0].session_id = id;
    step.segments[0].num_tokens = tokens;
    const std::byte* const data = reinterpret_cast<const std::byte*>(rows.data());
    step.k = step.v = data;
    step.k_bytes = step.v_bytes = tokens * kv_floats * sizeof(float);
    if (tokens == 1) {
      step.q = data;
      step.q_bytes = q_floats * sizeof(float);
      step.allocate = [&out](size_t, size_t) {
        return StepTask::Buffers{reinterpret_cast<std::byte*>(out.data()), nullptr};
      };
    }
    step.done = [&](const StepOutcome& outcome) {
      if (!outcome.status.ok() || !outcome.segments[0].status.ok()) failed.fetch_add(1);
      done.fetch_add(1);
    };
    return step;
  };
  constexpr int kWarmUp = 70;  // more than a block
  std::vector<StepTask> tasks;
  for (int i = 0; i < kWarmUp + steps; ++i) tasks.push_back(make_step(1));
  done.store(0);
  engine->Submit(make_step(model.context));
  await(1);
  int expected = 1;
  CallCounts before;
  for (StepTask& task : tasks) {
    if (expected == 1 + kWarmUp) before = CountedCalls();
    engine->Submit(std::move(task));
    await(++expected);
  }
  const CallCounts calls = CountedCalls() - before;
  EXPECT_EQ(failed.load(), 0);
  return calls;
}

class SteadyStep : public ::testing::TestWithParam<Model> {};

TEST_P(SteadyStep, CostsAFewAllocationsAndLocks) {
  constexpr int kSteps = 1000;
  for (const KvDType kv : {KvDType::kF32, KvDType::kBf16}) {
    const CallCounts calls = CountSteps(GetParam(), kv, kSteps);
    const auto per_step = [](int64_t count) { return static_cast<double>(count) / kSteps; };
    std::printf("%s %s, a step: %.2f allocations, %.2f engine locks, %.3f pthread locks\n", GetParam().name,
                kv == KvDType::kF32 ? "f32" : "bf16", per_step(calls.allocations), per_step(calls.absl_locks),
                per_step(calls.pthread_locks));
    EXPECT_GT(calls.allocations, 0);  // it does count: the job itself is one
    EXPECT_LE(per_step(calls.allocations), kMaxAllocations);
    EXPECT_EQ(calls.onednn_creations, 0);
    EXPECT_EQ(calls.executable_pages, 0);
    if (kCountsAbslLocks) {
      EXPECT_LE(per_step(calls.absl_locks), kMaxEngineLocks);
      EXPECT_GE(per_step(calls.absl_locks), 1);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, SteadyStep,
                         ::testing::Values(Model{"tiny", {1, 1}, 16, 1, 1}, Model{"llama3-8b", {32, 8}, 128, 64, 2},
                                           Model{"long", {32, 8}, 128, 4096, 2}),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           name.erase(std::remove(name.begin(), name.end(), '-'), name.end());
                           return name;
                         });

}  // namespace
}  // namespace attnd

#include "tests/unit/engine/engine_harness.h"

#include <gtest/gtest.h>

#include <random>

namespace attnd {

SessionConfig TinyConfig() {
  SessionConfig config;
  config.num_layers = 1;
  config.heads = {1, 1};
  config.shape = {1, 1, KvDType::kF32};
  config.softmax_scale = 1;
  return config;
}

EngineOptions Harness::DefaultOptions() {
  EngineOptions options;
  options.kv_cache_bytes = int64_t{64} << 20;
  options.compute_threads = 2;
  options.poison_cache = true;
  return options;
}

Harness::Harness(const EngineOptions& options) {
  auto created = Engine::Create(options, &observer);
  EXPECT_TRUE(created.ok()) << created.status();
  engine = *std::move(created);
}

absl::StatusOr<SessionInfo> Harness::TryCreate(const SessionConfig& config) {
  std::promise<absl::StatusOr<SessionInfo>> promise;
  engine->CreateSession(config, [&](absl::StatusOr<SessionInfo> info) { promise.set_value(std::move(info)); });
  return promise.get_future().get();
}

std::string Harness::Create(const SessionConfig& config) {
  const absl::StatusOr<SessionInfo> info = TryCreate(config);
  EXPECT_TRUE(info.ok()) << info.status();
  return info.ok() ? info->session_id : "";
}

std::future<StepAnswer> Harness::Start(StepArgs args) {
  struct Call {
    StepArgs args;
    StepAnswer answer;
    std::promise<StepAnswer> promise;
  };
  auto call = std::make_shared<Call>();
  call->args = std::move(args);
  StepTask task;
  task.layer = call->args.layer;
  task.segments = call->args.segments;
  const auto bytes = [](const std::vector<float>& t) { return reinterpret_cast<const std::byte*>(t.data()); };
  task.q = bytes(call->args.q), task.q_bytes = call->args.q.size() * sizeof(float);
  task.k = bytes(call->args.k), task.k_bytes = call->args.k.size() * sizeof(float);
  task.v = bytes(call->args.v), task.v_bytes = call->args.v.size() * sizeof(float);
  task.return_lse = call->args.return_lse;
  task.zero_empty_rows = call->args.zero_empty_rows;
  task.deadline = call->args.deadline;
  task.cancel = call->args.cancel;
  task.allocate = [raw = call.get()](size_t out_bytes, size_t lse_floats) {
    raw->answer.out.assign(out_bytes / sizeof(float), -777.0f);
    raw->answer.lse.assign(lse_floats, -777.0f);
    return StepTask::Buffers{reinterpret_cast<std::byte*>(raw->answer.out.data()), raw->answer.lse.data()};
  };
  std::future<StepAnswer> future = call->promise.get_future();
  task.done = [call](StepOutcome outcome) {
    StepAnswer& answer = call->answer;
    answer.status = outcome.status;
    for (const SegmentOutcome& segment : outcome.segments) answer.status.Update(segment.status);
    answer.segments = std::move(outcome.segments);
    answer.queue_time = outcome.queue_time;
    answer.compute_time = outcome.compute_time;
    call->promise.set_value(std::move(answer));
  };
  engine->Submit(std::move(task));
  return future;
}

StepArgs Harness::MeanArgs(const std::string& id, std::vector<float> v, std::optional<int64_t> start, bool rewind) {
  StepArgs args;
  StepSegment segment;
  segment.session_id = id;
  segment.num_tokens = static_cast<int64_t>(v.size());
  segment.start_position = start;
  segment.rewind = rewind;
  args.segments.push_back(segment);
  args.q.assign(v.size(), 0.0f);
  args.k.assign(v.size(), 0.0f);
  args.v = std::move(v);
  return args;
}

absl::StatusOr<SessionInfo> Harness::Rewind(const std::string& id, int64_t length) {
  std::promise<absl::StatusOr<SessionInfo>> promise;
  engine->RewindSession(id, length, [&](absl::StatusOr<SessionInfo> info) { promise.set_value(std::move(info)); });
  return promise.get_future().get();
}

absl::StatusOr<SessionInfo> Harness::TryFork(const std::string& id, std::optional<int64_t> length) {
  std::promise<absl::StatusOr<SessionInfo>> promise;
  engine->ForkSession(id, length, [&](absl::StatusOr<SessionInfo> info) { promise.set_value(std::move(info)); });
  return promise.get_future().get();
}

std::string Harness::Fork(const std::string& id, std::optional<int64_t> length) {
  const absl::StatusOr<SessionInfo> info = TryFork(id, length);
  EXPECT_TRUE(info.ok()) << info.status();
  return info.ok() ? info->session_id : "";
}

absl::StatusOr<std::vector<int64_t>> Harness::Reorder(std::vector<std::string> ids, std::vector<int> sources) {
  std::promise<absl::StatusOr<std::vector<int64_t>>> promise;
  engine->ReorderSessions(std::move(ids), std::move(sources),
                          [&](absl::StatusOr<std::vector<int64_t>> lengths) { promise.set_value(std::move(lengths)); });
  return promise.get_future().get();
}

int64_t Harness::Length(const std::string& id, int layer) {
  const absl::StatusOr<SessionInfo> info = engine->GetSession(id);
  EXPECT_TRUE(info.ok()) << info.status();
  return info.ok() ? info->layer_lengths[layer] : -1;
}

std::vector<float> RandomFloats(uint64_t seed, size_t count) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(count);
  for (float& x : out) x = normal(generator);
  return out;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace attnd

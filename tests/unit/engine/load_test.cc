// Many sessions and threads at once: order, isolation, cancellation, deadlines, bounds, drain (scenarios S04, S06, S07,
// S10, S19, C03, C06).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "tests/unit/engine/engine_harness.h"

namespace attnd {
namespace {

using ::testing::ElementsAre;

bool Eventually(const std::function<bool()>& condition, absl::Duration timeout = absl::Seconds(20)) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!condition()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

void ExpectEmpty(Harness* h) {
  const EngineStats stats = h->engine->stats();
  EXPECT_EQ(stats.sessions_active, 0);
  EXPECT_EQ(stats.used_bytes, 0);
  EXPECT_EQ(stats.reserved_bytes, 0);
  EXPECT_EQ(stats.cache_tokens, 0);
  EXPECT_EQ(stats.queue_depth, 0);
  EXPECT_EQ(stats.queue_tokens, 0);
}

// Pipelined steps of a session run in the order in which they were sent.
TEST(Load, S10PipelinedStepsKeepTheirOrder) {
  Harness h;
  const std::string id = h.Create();
  std::vector<std::future<StepAnswer>> answers;
  for (int i = 1; i <= 200; i++) answers.push_back(h.Start(Harness::MeanArgs(id, {static_cast<float>(i)})));
  for (int i = 1; i <= 200; i++) {
    const StepAnswer answer = answers[i - 1].get();
    EXPECT_TRUE(answer.status.ok()) << answer.status;
    EXPECT_NEAR(answer.out[0], (i + 1) / 2.0, 1e-3);
    EXPECT_EQ(answer.segments[0].length, i);
  }
}

TEST(Load, S10TwoClientsOnOneSession) {
  Harness h;
  const std::string id = h.Create();
  std::vector<std::thread> clients;
  for (int c = 0; c < 2; c++) {
    clients.emplace_back([&, c] {
      for (int i = 1; i <= 100; i++) {
        EXPECT_TRUE(h.Mean(id, {static_cast<float>(100 * c + i)}).status.ok());
      }
    });
  }
  for (std::thread& client : clients) client.join();
  const StepAnswer probe = h.Mean(id, {100.5});
  EXPECT_NEAR(probe.out[0], 100.5, 1e-3);
  EXPECT_EQ(probe.segments[0].length, 201);
}

TEST(Load, S19SessionsAreNeverMixed) {
  constexpr int kSteps = kThreadSanitizer ? 70 : 200;
  Harness h;
  SessionConfig config = TinyConfig();
  config.heads = {4, 2};
  config.shape = {16, 24, KvDType::kF32};
  std::vector<std::string> ids;
  for (int i = 0; i < 64; i++) ids.push_back(h.Create(config));
  std::vector<std::thread> clients;
  for (int t = 0; t < 16; t++) {
    clients.emplace_back([&, t] {
      for (int n = 0; n < kSteps; n++) {
        for (int s = t; s < 64; s += 16) {
          StepArgs args;
          args.segments.resize(1);
          args.segments[0].session_id = ids[s];
          args.segments[0].num_tokens = 1;
          args.q = RandomFloats(n * 64 + s, 64);
          args.k = RandomFloats(n * 64 + s + 1000000, 32);
          args.v.assign(48, static_cast<float>(s));
          const StepAnswer answer = h.Step(std::move(args));
          ASSERT_TRUE(answer.status.ok()) << answer.status;
          for (const float x : answer.out) ASSERT_NEAR(x, s, 1e-3);
        }
      }
    });
  }
  for (std::thread& client : clients) client.join();
  for (const std::string& id : ids) EXPECT_EQ(h.Length(id), kSteps);
  for (const std::string& id : ids) EXPECT_TRUE(h.engine->CloseSession(id).value());
  ExpectEmpty(&h);
}

// Steps of several sessions that overlap in every way neither deadlock nor lose their order.
TEST(Load, StepsOfSeveralSessionsOverlap) {
  Harness h;
  std::vector<std::string> ids;
  for (int i = 0; i < 6; i++) ids.push_back(h.Create());
  std::atomic<int> appended{0};
  std::vector<std::thread> clients;
  for (int t = 0; t < 6; t++) {
    clients.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int n = 0; n < 200; n++) {
        std::vector<std::string> some = ids;
        std::shuffle(some.begin(), some.end(), random);
        some.resize(1 + random() % 4);
        StepArgs args;
        for (const std::string& id : some) args.segments.push_back(Harness::MeanArgs(id, {1}).segments[0]);
        args.q = args.k = std::vector<float>(some.size(), 0);
        args.v = std::vector<float>(some.size(), 3);
        appended += static_cast<int>(some.size());
        const StepAnswer answer = h.Step(std::move(args));
        ASSERT_TRUE(answer.status.ok()) << answer.status;
        for (const float x : answer.out) ASSERT_NEAR(x, 3, 1e-5);
      }
    });
  }
  for (std::thread& client : clients) client.join();
  int64_t total = 0;
  for (const std::string& id : ids) total += h.Length(id);
  EXPECT_EQ(total, appended);
}

TEST(Load, CancelledAtEveryStage) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.compute_hook = gate.hook();
  options.prefill_chunk_tokens = 64;
  Harness h(options);
  gate.Open();
  const std::string id = h.Create(), other = h.Create();
  EXPECT_TRUE(h.Mean(id, {1, 2, 3}).status.ok());
  const int64_t used = h.used_bytes();
  gate.Close();
  const auto cancellable = [&](std::vector<float> v) {
    StepArgs args = Harness::MeanArgs(id, std::move(v));
    args.cancel = std::make_shared<CancelToken>();
    return args;
  };
  // Before it is submitted; while it is computed; in the queue behind that; between the chunks of a prefill.
  StepArgs before = cancellable({50});
  before.cancel->cancelled = true;
  EXPECT_EQ(h.Step(before).status.code(), absl::StatusCode::kCancelled);

  StepArgs computing = cancellable({50}), queued = cancellable({50});
  auto computing_answer = h.Start(computing);
  gate.AwaitArrival(2);
  auto queued_answer = h.Start(queued);
  auto behind = h.Start(Harness::MeanArgs(id, {6}));
  computing.cancel->cancelled = true;
  queued.cancel->cancelled = true;
  gate.Open();
  EXPECT_EQ(computing_answer.get().status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(queued_answer.get().status.code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(behind.get().out, ElementsAre(3));
  EXPECT_EQ(h.used_bytes(), used);

  gate.Close();
  StepArgs chunked = cancellable(std::vector<float>(1000, 50));
  auto chunked_answer = h.Start(chunked);
  gate.AwaitArrival(4);
  EXPECT_GT(h.used_bytes(), used);  // its memory was taken
  chunked.cancel->cancelled = true;
  gate.Open();
  EXPECT_EQ(chunked_answer.get().status.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(h.used_bytes(), used);
  EXPECT_EQ(h.Length(id), 4);
  EXPECT_NEAR(h.Mean(id, {8}).out[0], 4, 1e-5);
  EXPECT_EQ(h.observer["cancelled queued"], 2);
  EXPECT_EQ(h.observer["cancelled computing"], 2);
  (void)other;
}

TEST(Load, DeadlineAtEveryStage) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.compute_hook = gate.hook();
  options.prefill_chunk_tokens = 64;
  Harness h(options);
  gate.Open();
  const std::string id = h.Create();
  EXPECT_TRUE(h.Mean(id, {1, 2, 3}).status.ok());
  const int64_t used = h.used_bytes();
  const auto with_deadline = [&](std::vector<float> v) {
    StepArgs args = Harness::MeanArgs(id, std::move(v));
    args.deadline = absl::Now() + absl::Milliseconds(30);
    return h.Start(args);
  };
  gate.Close();
  auto computing = with_deadline({50});
  auto queued = with_deadline({50});
  absl::SleepFor(absl::Milliseconds(50));
  gate.Open();
  EXPECT_EQ(computing.get().status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(queued.get().status.code(), absl::StatusCode::kDeadlineExceeded);
  gate.Close();
  auto chunked = with_deadline(std::vector<float>(1000, 50));
  absl::SleepFor(absl::Milliseconds(50));
  gate.Open();
  EXPECT_EQ(chunked.get().status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(h.used_bytes(), used);
  EXPECT_THAT(h.Mean(id, {6}).out, ElementsAre(3));
}

TEST(Load, C06CloseAnswersWhatIsQueued) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.compute_hook = gate.hook();
  Harness h(options);
  const std::string id = h.Create();
  std::vector<std::future<StepAnswer>> answers;
  answers.push_back(h.Start(Harness::MeanArgs(id, {7})));
  gate.AwaitArrival();
  for (int i = 0; i < 20; i++) answers.push_back(h.Start(Harness::MeanArgs(id, {1})));
  EXPECT_TRUE(h.engine->CloseSession(id).value());
  EXPECT_EQ(h.Mean(id, {1}).reason(), "CLOSED");
  EXPECT_FALSE(h.engine->CloseSession(id).value());
  EXPECT_GT(h.used_bytes(), 0);  // the running step still reads them
  gate.Open();
  EXPECT_THAT(answers[0].get().out, ElementsAre(7));
  for (int i = 1; i <= 20; i++) EXPECT_EQ(answers[i].get().reason(), "CLOSED");
  ExpectEmpty(&h);
}

TEST(Load, RewindWaitsForTheQueuedSteps) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.compute_hook = gate.hook();
  Harness h(options);
  const std::string id = h.Create();
  auto first = h.Start(Harness::MeanArgs(id, {1, 2, 3}));
  auto second = h.Start(Harness::MeanArgs(id, {100}));
  gate.AwaitArrival();
  std::promise<absl::StatusOr<SessionInfo>> rewound;
  h.engine->RewindSession(id, 3, [&](absl::StatusOr<SessionInfo> info) { rewound.set_value(std::move(info)); });
  auto third = h.Start(Harness::MeanArgs(id, {6}));
  gate.Open();
  EXPECT_TRUE(first.get().status.ok());
  EXPECT_TRUE(second.get().status.ok());
  EXPECT_THAT(rewound.get_future().get()->layer_lengths, ElementsAre(3));
  EXPECT_THAT(third.get().out, ElementsAre(3));
}

TEST(Load, QueueIsBounded) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.compute_hook = gate.hook();
  options.max_queue_requests = 4;
  options.max_queue_tokens = 100;
  Harness h(options);
  std::vector<std::string> ids;
  for (int i = 0; i < 8; i++) ids.push_back(h.Create());
  std::vector<std::future<StepAnswer>> answers;
  answers.push_back(h.Start(Harness::MeanArgs(ids[0], {1})));
  gate.AwaitArrival();
  answers.push_back(h.Start(Harness::MeanArgs(ids[1], std::vector<float>(90, 1))));
  StepAnswer full = h.Mean(ids[2], std::vector<float>(11, 1));
  EXPECT_EQ(full.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(full.reason(), "QUEUE_FULL");
  EXPECT_GT(GetErrorDetails(full.status).retry_delay, absl::ZeroDuration());
  for (int i = 2; i < 5; i++) answers.push_back(h.Start(Harness::MeanArgs(ids[i], {1})));
  EXPECT_EQ(h.engine->stats().queue_depth, 4);
  EXPECT_EQ(h.engine->stats().queue_tokens, 93);
  EXPECT_EQ(h.Mean(ids[5], {1}).reason(), "QUEUE_FULL");
  EXPECT_EQ(h.observer["rejected QUEUE_FULL"], 2);
  gate.Open();
  for (auto& answer : answers) EXPECT_TRUE(answer.get().status.ok());
  EXPECT_TRUE(h.Mean(ids[5], {1}).status.ok());
  EXPECT_EQ(h.engine->stats().queue_depth, 0);
}

// 64 tokens a batch of 10 ms or more: 6400 tokens are a wait of a second, whether they have started or not.
TEST(Load, WorkThatWouldWaitTooLongIsRefusedAtOnce) {
  EngineOptions options = Harness::DefaultOptions();
  options.prefill_chunk_tokens = 64;
  options.max_queue_delay = absl::Milliseconds(500);
  options.compute_hook = [] {
    absl::SleepFor(absl::Milliseconds(10));
    return absl::OkStatus();
  };
  Harness h(options);
  const std::string a = h.Create(), b = h.Create(), c = h.Create();
  ASSERT_TRUE(h.Mean(a, std::vector<float>(640, 1)).status.ok());  // it knows how fast it is now
  auto first = h.Start(Harness::MeanArgs(a, std::vector<float>(6400, 1)));
  absl::SleepFor(absl::Milliseconds(100));
  ASSERT_EQ(h.engine->stats().queue_tokens, 0) << "the long one has started";

  const absl::Time begin = absl::Now();
  const StepAnswer refused = h.Mean(b, std::vector<float>(64, 1));
  EXPECT_LT(absl::Now() - begin, absl::Milliseconds(100));
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kResourceExhausted) << refused.status;
  EXPECT_EQ(refused.reason(), "QUEUE_FULL");
  const ErrorDetails details = GetErrorDetails(refused.status);
  EXPECT_GE(details.metadata.count("expected_delay_ms"), 1u);
  EXPECT_GT(details.retry_delay, absl::Milliseconds(400));
  EXPECT_TRUE(h.Mean(c, {1}).status.ok()) << "decodes do not wait for prefills";
  EXPECT_TRUE(first.get().status.ok());
  EXPECT_TRUE(h.Mean(b, std::vector<float>(64, 1)).status.ok());
  EXPECT_TRUE(h.Mean(b, std::vector<float>(6400, 1)).status.ok()) << "alone, any length is taken";
}

// Decodes take turns with a long prefill's chunks.
TEST(Load, C03DecodesAreNotStuckBehindALongPrefill) {
  EngineOptions options = Harness::DefaultOptions();
  options.prefill_chunk_tokens = 64;
  std::atomic<bool> slow{false};
  options.compute_hook = [&] {
    if (slow) absl::SleepFor(absl::Milliseconds(5));
    return absl::OkStatus();
  };
  Harness h(options);
  const std::string a = h.Create(), b = h.Create();
  slow = true;
  auto prefill = h.Start(Harness::MeanArgs(a, std::vector<float>(8192, 1)));  // 128 chunks of 5 ms
  std::vector<double> ms;
  while (prefill.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    const absl::Time begin = absl::Now();
    EXPECT_TRUE(h.Mean(b, {2}).status.ok());
    ms.push_back(absl::ToDoubleMilliseconds(absl::Now() - begin));
  }
  EXPECT_TRUE(prefill.get().status.ok());
  EXPECT_GE(ms.size(), 30u);
  std::sort(ms.begin(), ms.end());
  // A batch that runs, and its own: 10 ms, where the prefill takes 640.
  EXPECT_LT(ms[ms.size() / 2], kThreadSanitizer ? 250 : 50);
}

TEST(Load, DrainFinishesWhatIsThere) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.compute_hook = gate.hook();
  options.prefill_chunk_tokens = 64;
  Harness h(options);
  const std::string a = h.Create(), b = h.Create();
  auto prefill = h.Start(Harness::MeanArgs(a, std::vector<float>(300, 1)));
  gate.AwaitArrival();
  auto decode = h.Start(Harness::MeanArgs(b, {2}));
  std::thread drain([&] { EXPECT_TRUE(h.engine->Drain(absl::Now() + absl::Seconds(60))); });
  ASSERT_TRUE(Eventually([&] { return h.engine->stats().draining; }));
  EXPECT_EQ(h.Mean(b, {1}).status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(h.Mean(b, {1}).reason(), "DRAINING");
  EXPECT_EQ(h.TryCreate(TinyConfig()).status().code(), absl::StatusCode::kUnavailable);
  gate.Open();
  drain.join();
  EXPECT_TRUE(prefill.get().status.ok());
  EXPECT_TRUE(decode.get().status.ok());
}

TEST(Load, DrainGivesUpAtItsDeadline) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.compute_hook = gate.hook();
  options.prefill_chunk_tokens = 64;
  Harness h(options);
  const std::string a = h.Create(), b = h.Create();
  auto prefill = h.Start(Harness::MeanArgs(a, std::vector<float>(300, 1)));
  gate.AwaitArrival();
  auto decode = h.Start(Harness::MeanArgs(b, {2}));
  EXPECT_FALSE(h.engine->Drain(absl::Now() + absl::Milliseconds(20)));
  EXPECT_EQ(decode.get().status.code(), absl::StatusCode::kUnavailable);
  gate.Open();
  EXPECT_EQ(prefill.get().status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(h.Length(a), 0);
  EXPECT_EQ(h.used_bytes(), 0);
}

TEST(Load, DestructionAnswersEverything) {
  std::vector<std::future<StepAnswer>> answers;
  {
    Harness h;
    std::vector<std::string> ids;
    for (int i = 0; i < 10; i++) ids.push_back(h.Create());
    for (int n = 0; n < 20; n++) {
      for (const std::string& id : ids) answers.push_back(h.Start(Harness::MeanArgs(id, {1})));
    }
  }
  for (auto& answer : answers) {
    const absl::Status status = answer.get().status;
    EXPECT_TRUE(status.ok() || absl::IsUnavailable(status)) << status;
  }
}

// Sessions whose time to live is about as long as a step takes, stepped about that often.
TEST(Ttl, S04ExpiryRacesWithSteps) {
  EngineOptions options = Harness::DefaultOptions();
  options.compute_hook = [] {
    absl::SleepFor(absl::Milliseconds(6));
    return absl::OkStatus();
  };
  Harness h(options);
  SessionConfig config = TinyConfig();
  config.ttl = absl::Milliseconds(5);
  std::atomic<int> answered{0}, expired{0};
  std::vector<std::thread> clients;
  for (int t = 0; t < 32; t++) {
    clients.emplace_back([&, t] {
      std::mt19937 random(t);
      std::string id = h.Create(config);
      int64_t length = 0;
      const absl::Time end = absl::Now() + absl::Seconds(3);
      while (absl::Now() < end) {
        absl::SleepFor(absl::Microseconds(4500 + random() % 1000));
        const StepAnswer answer = h.Mean(id, {static_cast<float>(length)});
        if (answer.status.ok()) {
          EXPECT_NEAR(answer.out[0], static_cast<double>(length) / 2, 1e-3);
          EXPECT_EQ(answer.segments[0].length, ++length);
          answered++;
        } else {
          EXPECT_EQ(answer.reason(), "EXPIRED");
          expired++;
          id = h.Create(config);
          length = 0;
        }
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_GT(answered, 0);
  EXPECT_GT(expired, 0);
  EXPECT_TRUE(Eventually([&] { return h.engine->stats().sessions_active == 0; }));
  EXPECT_TRUE(Eventually([&] { return h.used_bytes() == 0; }));
  ExpectEmpty(&h);
  EXPECT_EQ(h.observer["created"], h.observer["expired"]);
}

TEST(Ttl, IdleClockStartsWhenTheStepEnds) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.session_idle_ttl = absl::Milliseconds(200);
  options.compute_hook = gate.hook();
  Harness h(options);
  const std::string id = h.Create();
  auto answer = h.Start(Harness::MeanArgs(id, {1}));
  gate.AwaitArrival();
  absl::SleepFor(absl::Milliseconds(400));
  EXPECT_TRUE(h.engine->GetSession(id).ok());  // a step is running
  EXPECT_EQ(h.engine->GetSession(id)->idle_time, absl::ZeroDuration());
  gate.Open();
  EXPECT_TRUE(answer.get().status.ok());
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_TRUE(h.Mean(id, {1}).status.ok());
  EXPECT_TRUE(Eventually([&] { return !h.engine->GetSession(id).ok(); }));
  EXPECT_EQ(h.Mean(id, {1}).reason(), "EXPIRED");
  EXPECT_EQ(h.observer["expired"], 1);
  SessionConfig forever = TinyConfig();
  forever.ttl = absl::InfiniteDuration();
  const std::string eternal = h.Create(forever);
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_TRUE(h.engine->GetSession(eternal).ok());
  EXPECT_EQ(h.engine->GetSession(eternal)->time_to_live, absl::InfiniteDuration());
}

double ProcessCpuSeconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// S06: each id is reaped once, and nobody spins: neither the reaper nor the idle compute threads.
TEST(Ttl, S06TheReaperDoesNotSpin) {
  Gate gate;
  EngineOptions options = Harness::DefaultOptions();
  options.session_idle_ttl = absl::Milliseconds(20);
  options.compute_hook = gate.hook();
  Harness h(options);
  std::vector<std::future<StepAnswer>> answers;
  SessionConfig patient = TinyConfig();
  patient.ttl = absl::Seconds(10);
  for (int i = 0; i < 100; i++) answers.push_back(h.Start(Harness::MeanArgs(h.Create(patient), {1})));
  for (int i = 0; i < 100; i++) h.Create();
  EXPECT_TRUE(Eventually([&] { return h.observer["expired"] == 100; }));
  const double before = ProcessCpuSeconds();
  absl::SleepFor(absl::Seconds(1));
  EXPECT_LT(ProcessCpuSeconds() - before, 0.1);
  EXPECT_EQ(h.observer["expired"], 100);
  gate.Open();
  for (auto& answer : answers) EXPECT_TRUE(answer.get().status.ok());
}

// S07: clients that never close. Their sessions go after their time and make room for others, round after round.
TEST(Ttl, S07ClientsThatVanish) {
  EngineOptions options = Harness::DefaultOptions();
  options.session_idle_ttl = absl::Milliseconds(20);
  options.max_sessions = 60;
  Harness h(options);
  for (int round = 0; round < 10; round++) {
    for (int i = 0; i < 50; i++) {
      const std::string id = h.Create();
      (void)h.Start(Harness::MeanArgs(id, {1}));
    }
    ASSERT_TRUE(Eventually([&] { return h.engine->stats().sessions_active == 0; })) << round;
  }
  EXPECT_TRUE(Eventually([&] { return h.used_bytes() == 0; }));
  ExpectEmpty(&h);
}

int64_t ResidentBytes() {
  std::ifstream in("/proc/self/statm");
  int64_t size = 0, resident = 0;
  in >> size >> resident;
  return resident * 4096;
}

TEST(Load, MemoryStaysFlatOverManySteps) {
  Harness h;
  const auto round = [&] {
    std::vector<std::string> ids;
    for (int i = 0; i < 100; i++) ids.push_back(h.Create());
    for (int n = 0; n < 40; n++) {
      std::vector<std::future<StepAnswer>> answers;
      for (const std::string& id : ids) answers.push_back(h.Start(Harness::MeanArgs(id, {1})));
      for (auto& answer : answers) EXPECT_TRUE(answer.get().status.ok());
    }
    for (const std::string& id : ids) EXPECT_TRUE(h.engine->CloseSession(id).value());
  };
  for (int i = 0; i < 3; i++) round();
  const int64_t before = ResidentBytes();
  for (int i = 0; i < 10; i++) round();
  const int64_t growth = ResidentBytes() - before;
  EXPECT_LT(growth, kHoldsFreedMemory ? 512 << 20 : 4 << 20);
  ExpectEmpty(&h);
}

// Beside its blocks, a session of 64 tokens may take 2 KiB.
TEST(Load, IdleSessionsAreSmall) {
  constexpr int kSessions = kThreadSanitizer ? 1000 : 5000;
  EngineOptions options = Harness::DefaultOptions();
  options.max_sessions = kSessions;
  options.poison_cache = false;
  Harness h(options);
  const std::string first = h.Create();
  EXPECT_TRUE(h.Mean(first, std::vector<float>(64, 1)).status.ok());
  const int64_t before = ResidentBytes();
  SessionConfig config = TinyConfig();
  config.num_layers = 4;
  for (int i = 1; i < kSessions; i++) {
    const std::string id = h.Create(config);
    for (int layer = 0; layer < 4; layer++) {
      StepArgs args = Harness::MeanArgs(id, std::vector<float>(64, 1));
      args.layer = layer;
      ASSERT_TRUE(h.Step(std::move(args)).status.ok());
    }
  }
  const int64_t beside = ResidentBytes() - before - h.used_bytes();
  EXPECT_LT(beside / kSessions, kHoldsFreedMemory ? 1 << 20 : 2048);
  RecordProperty("bytes_per_session", std::to_string(beside / kSessions));
}

// Gauges read at any moment: used <= reserved <= capacity.
TEST(Load, GaugesAgreeUnderLoad) {
  EngineOptions options = Harness::DefaultOptions();
  options.kv_cache_bytes = 64 * 512;
  Harness h(options);
  std::atomic<bool> stop{false};
  std::thread scraper([&] {
    while (!stop) {
      const EngineStats s = h.engine->stats();
      ASSERT_LE(s.used_bytes, s.reserved_bytes);
      ASSERT_LE(s.reserved_bytes, s.capacity_bytes);
      ASSERT_GE(s.used_bytes, 0);
    }
  });
  std::vector<std::thread> clients;
  for (int t = 0; t < 4; t++) {
    clients.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int n = 0; n < 300; n++) {
        SessionConfig config = TinyConfig();
        config.reserve_tokens = random() % 300;
        const auto info = h.TryCreate(config);
        if (!info.ok()) continue;
        for (int i = 0; i < 5; i++) (void)h.Mean(info->session_id, std::vector<float>(1 + random() % 200, 1));
        EXPECT_TRUE(h.engine->CloseSession(info->session_id).ok());
      }
    });
  }
  for (std::thread& client : clients) client.join();
  stop = true;
  scraper.join();
  ExpectEmpty(&h);
}

}  // namespace
}  // namespace attnd

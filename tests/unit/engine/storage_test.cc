// Sessions on disk: spilled while memory is short, brought back by their next step.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "tests/unit/engine/storage_fixture.h"

namespace attnd {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;

using Storage = StorageFixture;

TEST_F(Storage, ASessionThatMadeRoomComesBackWithItsNextStep) {
  Harness h(SpillOptions(4));
  const std::string a = h.Create();
  ASSERT_TRUE(h.Mean(a, {1, 2, 3}).status.ok());
  Push(&h, a);
  const absl::StatusOr<SessionInfo> info = h.engine->GetSession(a);
  EXPECT_EQ(info->used_bytes, 0);
  EXPECT_THAT(info->layer_lengths, ElementsAre(3));
  EXPECT_EQ(info->spilled_bytes, static_cast<int64_t>(fs::file_size(File(a))));
  EXPECT_GE(h.engine->stats().sessions_spilled, 1);
  EXPECT_GE(h.engine->stats().spilled_bytes, info->spilled_bytes);
  EXPECT_THAT(h.Mean(a, {6}).out, ElementsAre(3));
  EXPECT_FALSE(fs::exists(File(a)));
  EXPECT_EQ(h.engine->GetSession(a)->spilled_bytes, 0);
  EXPECT_GE(h.observer["snapshot spill"], 1);
  EXPECT_EQ(h.observer["snapshot restore"], 1);
  EXPECT_EQ(h.observer["evicted"], 0);
}

TEST_F(Storage, ManyMoreSessionsThanFitAllKeepTheirValues) {
  constexpr int kSessions = 24;
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  Harness h(SpillOptions(8));
  struct Twin {
    std::string id;
    std::vector<float> values;
  };
  std::vector<Twin> twins(kSessions);
  for (Twin& twin : twins) twin.id = h.Create();
  for (int step = 0; step < (kThreadSanitizer ? 200 : 1500); step++) {
    Twin& twin = twins[random() % kSessions];
    if (random() % 8 == 0) {
      const int64_t length = random() % (twin.values.size() + 1);
      ASSERT_TRUE(h.Rewind(twin.id, length).ok());
      twin.values.resize(length);
    }
    std::vector<float> tokens(1 + random() % 70);
    for (float& x : tokens) x = static_cast<float>(random() % 100);
    if (twin.values.size() + tokens.size() > 200) {
      ASSERT_TRUE(h.Rewind(twin.id, 0).ok());
      twin.values.clear();
    }
    double sum = 0;
    std::vector<float> expected;
    for (const float x : twin.values) sum += x;
    for (const float x : tokens) {
      twin.values.push_back(x);
      sum += x;
      expected.push_back(static_cast<float>(sum / static_cast<double>(twin.values.size())));
    }
    const StepAnswer answer = h.Mean(twin.id, tokens);
    ASSERT_TRUE(answer.status.ok()) << step << ": " << answer.status;
    ASSERT_THAT(answer.out, Pointwise(FloatNear(1e-3f), expected)) << step;
    const EngineStats stats = h.engine->stats();
    ASSERT_LE(stats.used_bytes, stats.reserved_bytes);
    ASSERT_LE(stats.reserved_bytes, stats.capacity_bytes);
  }
  EXPECT_GT(h.observer["snapshot spill"], 10);
  EXPECT_GT(h.observer["snapshot restore"], 10);
  for (const Twin& twin : twins) EXPECT_TRUE(h.engine->CloseSession(twin.id).value());
  EXPECT_EQ(h.engine->stats().sessions_spilled, 0);
  EXPECT_EQ(h.engine->stats().spilled_bytes, 0);
  for (int i = 0; i < 200 && h.used_bytes() > 0; i++) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(h.used_bytes(), 0);
  EXPECT_EQ(Files(directory_ / "spill"), 0);
}

TEST_F(Storage, AStepOfSeveralSessionsWaitsForAllOfThem) {
  Harness h(SpillOptions(4));
  const std::string a = h.Create(), b = h.Create(), c = h.Create();
  ASSERT_TRUE(h.Mean(a, {1}).status.ok());
  ASSERT_TRUE(h.Mean(b, {3}).status.ok());
  Push(&h, b);
  StepArgs args = Harness::MeanArgs(a, {5});
  args.segments.push_back({c, 1, {}, false, {}});
  args.segments.push_back({b, 1, {}, false, {}});
  args.q = args.k = {0, 0, 0};
  args.v = {5, 7, 9};
  EXPECT_THAT(h.Step(std::move(args)).out, ElementsAre(3, 7, 6));
}

TEST_F(Storage, RewindBringsASessionBack) {
  Harness h(SpillOptions(4));
  const std::string a = h.Create();
  ASSERT_TRUE(h.Mean(a, {1, 2, 3, 100}).status.ok());
  Push(&h, a);
  const absl::StatusOr<SessionInfo> info = h.Rewind(a, 3);
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_THAT(info->layer_lengths, ElementsAre(3));
  EXPECT_THAT(h.Mean(a, {6}).out, ElementsAre(3));
}

TEST_F(Storage, ClosingAndExpiringTakesTheFileToo) {
  Harness h(SpillOptions(4));
  const std::string a = h.Create();
  SessionConfig brief = TinyConfig();
  brief.ttl = absl::Milliseconds(300);
  const std::string b = h.Create(brief);
  ASSERT_TRUE(h.Mean(a, {1}).status.ok());
  ASSERT_TRUE(h.Mean(b, {1}).status.ok());
  Push(&h, a);
  ASSERT_TRUE(fs::exists(File(a)));
  EXPECT_TRUE(h.engine->CloseSession(a).value());
  EXPECT_FALSE(fs::exists(File(a)));
  EXPECT_EQ(h.Mean(a, {1}).reason(), "CLOSED");
  while (h.engine->GetSession(b).ok()) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(h.Mean(b, {1}).reason(), "EXPIRED");
  for (int i = 0; i < 200 && fs::exists(File(b)); i++) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_FALSE(fs::exists(File(b)));
}

TEST_F(Storage, ADamagedFileLosesThatSessionAndNoOther) {
  const auto flip = [this](const std::string& id, int64_t from_end) {
    std::fstream file(File(id), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-from_end, std::ios::end);
    const char byte = static_cast<char>(file.get());
    file.seekp(-from_end, std::ios::end);
    file.put(static_cast<char>(byte ^ 0x10));
  };
  const std::function<void(const std::string&)> damages[] = {
      [&](const std::string& id) { flip(id, 200); },
      [&](const std::string& id) { flip(id, static_cast<int64_t>(fs::file_size(File(id))) - 3); },
      [&](const std::string& id) { fs::resize_file(File(id), fs::file_size(File(id)) - 1); },
      [&](const std::string& id) { fs::resize_file(File(id), 0); },
      [&](const std::string& id) { fs::remove(File(id)); },
  };
  for (const auto& damage : damages) {
    Harness h(SpillOptions(4));
    const std::string a = h.Create(), b = h.Create();
    ASSERT_TRUE(h.Mean(a, {1}).status.ok());
    ASSERT_TRUE(h.Mean(b, {1, 3}).status.ok());
    Push(&h, b);
    damage(a);
    const StepAnswer lost = h.Mean(a, {3});
    EXPECT_EQ(lost.status.code(), absl::StatusCode::kDataLoss) << lost.status;
    EXPECT_EQ(lost.reason(), "SPILL_DAMAGED");
    EXPECT_EQ(h.Mean(a, {3}).status.code(), absl::StatusCode::kDataLoss);
    EXPECT_FALSE(fs::exists(File(a)));
    EXPECT_EQ(h.observer["lost"], 1);
    EXPECT_EQ(h.observer["failed restore"], 1);
    EXPECT_THAT(h.Mean(b, {5}).out, ElementsAre(3));
    EXPECT_EQ(h.engine->CloseSession(a).value(), false);
  }
}

TEST_F(Storage, AFileThatCannotBeReadNowIsReadLater) {
  std::atomic<int> fails = 0;
  EngineOptions options = SpillOptions(4);
  options.fail_io = [&](const char*) { return fails.load(); };
  Harness h(options);
  const std::string a = h.Create();
  ASSERT_TRUE(h.Mean(a, {1, 2, 3}).status.ok());
  Push(&h, a);
  // So that nobody has to make room.
  for (const SessionInfo& other : h.engine->ListSessions(0, 1000)) {
    if (other.session_id == a) continue;
    ASSERT_TRUE(h.engine->CloseSession(other.session_id).ok());
  }
  for (const int error : {EMFILE, EIO, ESTALE}) {
    fails = error;
    const StepAnswer refused = h.Mean(a, {6});
    EXPECT_EQ(refused.reason(), "CACHE_FULL") << refused.status;
    EXPECT_THAT(std::string(refused.status.message()), HasSubstr(std::strerror(error)));
    EXPECT_GT(GetErrorDetails(refused.status).retry_delay, absl::ZeroDuration());
  }
  fails = 0;
  EXPECT_THAT(h.Mean(a, {6}).out, ElementsAre(3));
}

TEST_F(Storage, StepsOfOthersGoOnWhileOneSessionIsWrittenAndWhileItIsRead) {
  absl::Mutex mutex;
  std::string held_call;  // waits until this is another
  bool arrived = false;
  EngineOptions options = SpillOptions(4);
  options.fail_io = [&](const char* call) {
    absl::MutexLock lock(&mutex);
    if (held_call != call) return 0;
    arrived = true;
    mutex.Await(absl::Condition(+[](std::string* held) { return held->empty(); }, &held_call));
    return 0;
  };
  const auto hold = [&](const std::string& call) {
    absl::MutexLock lock(&mutex);
    held_call = call;
    arrived = false;
  };
  const auto await_arrival = [&] {
    absl::MutexLock lock(&mutex);
    mutex.Await(absl::Condition(&arrived));
  };
  Harness h(options);
  const std::string a = h.Create(), b = h.Create(), c = h.Create(), d = h.Create(), e = h.Create();
  for (const std::string& id : {a, b, c, d}) ASSERT_TRUE(h.Mean(id, {1, 3}).status.ok());

  hold("write");
  std::future<StepAnswer> on_e = h.Start(Harness::MeanArgs(e, {7}));  // a has to go for it
  await_arrival();
  for (int i = 0; i < 20; i++) EXPECT_THAT(h.Mean(d, {2}).out, ElementsAre(2)) << i;
  EXPECT_EQ(on_e.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  hold("");
  EXPECT_THAT(on_e.get().out, ElementsAre(7));

  hold("read");
  std::future<StepAnswer> on_a = h.Start(Harness::MeanArgs(a, {2}));
  await_arrival();
  for (int i = 0; i < 20; i++) EXPECT_THAT(h.Mean(e, {7}).out, ElementsAre(7)) << i;
  EXPECT_EQ(on_a.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  hold("");
  EXPECT_THAT(on_a.get().out, ElementsAre(2));
}

TEST_F(Storage, ErrorsOfTheDiskThatLookLikeOursAreItsOwn) {
  // Abseil calls ESTALE, what network file systems say of files that are gone, by the name ABORTED.
  for (const std::string fails : {"write", "rename", "close"}) {
    std::atomic<bool> broken = true;
    EngineOptions options = SpillOptions(3);
    options.fail_io = [&](const char* call) { return broken && fails == call ? ESTALE : 0; };
    Harness h(options);
    const std::string a = h.Create(), b = h.Create(), c = h.Create(), d = h.Create();
    for (const std::string& id : {a, b, c}) ASSERT_TRUE(h.Mean(id, {1}).status.ok());
    const StepAnswer refused = h.Mean(d, {1});
    EXPECT_EQ(refused.reason(), "CACHE_FULL") << fails;
    EXPECT_THAT(std::string(refused.status.message()), HasSubstr("cannot be moved to disk")) << fails;
    EXPECT_EQ(h.engine->stats().sessions_spilled, 0);
    for (const std::string& id : {a, b, c}) EXPECT_THAT(h.Mean(id, {3}).out, ElementsAre(2)) << fails;
    broken = false;
    absl::SleepFor(absl::Milliseconds(1100));  // until it is tried again
    EXPECT_THAT(h.Mean(d, {5}).out, ElementsAre(5)) << fails;
    for (const std::string& id : {a, b, c}) EXPECT_THAT(h.Mean(id, {5}).out, ElementsAre(3)) << fails;
  }
}

TEST_F(Storage, ADiskThatTakesNothingLosesNothing) {
  Harness h(SpillOptions(3));
  const std::string a = h.Create(), b = h.Create(), c = h.Create(), d = h.Create();
  for (const std::string& id : {a, b, c}) ASSERT_TRUE(h.Mean(id, {1}).status.ok());
  fs::remove_all(directory_ / "spill");
  const StepAnswer refused = h.Mean(d, {1});
  EXPECT_EQ(refused.reason(), "CACHE_FULL");
  EXPECT_THAT(std::string(refused.status.message()), HasSubstr("cannot be moved to disk"));
  EXPECT_GT(GetErrorDetails(refused.status).retry_delay, absl::ZeroDuration());
  EXPECT_GE(h.observer["failed spill"], 1);
  for (const std::string& id : {a, b, c}) EXPECT_THAT(h.Mean(id, {3}).out, ElementsAre(2));
}

TEST_F(Storage, SomethingQueuedForASessionOnItsWayToDiskKeepsItHere) {
  // Steps race with spills of the same few sessions; the values tell whether one was lost or seen twice.
  Harness h(SpillOptions(3));
  std::vector<std::string> ids;
  for (int i = 0; i < 6; i++) ids.push_back(h.Create());
  std::vector<std::future<StepAnswer>> answers;
  for (int round = 0; round < 50; round++) {
    for (size_t i = 0; i < ids.size(); i++) answers.push_back(h.Start(Harness::MeanArgs(ids[i], {float(i)})));
    for (size_t i = 0; i < ids.size(); i++) {
      const StepAnswer answer = answers[answers.size() - ids.size() + i].get();
      if (!answer.status.ok()) {
        ASSERT_EQ(answer.reason(), "CACHE_FULL");  // six at a time are more than fit
        continue;
      }
      ASSERT_THAT(answer.out, ElementsAre(float(i)));
    }
  }
}

TEST_F(Storage, ASpillDirectoryThatCannotBeUsedStopsTheStart) {
  std::ofstream(directory_ / "file") << "x";
  EngineOptions options = SpillOptions(4);
  options.spill_dir = (directory_ / "file").string();
  EXPECT_FALSE(Engine::Create(options, nullptr).ok());
  options.spill_dir = (directory_ / "spill").string();
  options.evict_lru = false;
  EXPECT_FALSE(Engine::Create(options, nullptr).ok());
}

}  // namespace
}  // namespace attnd

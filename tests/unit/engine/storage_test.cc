// Sessions on disk: spilled while memory is short, brought back by their next step, saved for a later process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/unit/engine/engine_harness.h"

namespace attnd {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;

constexpr int64_t kTinyBlock = 512;

class Storage : public ::testing::Test {
 protected:
  Storage() {
    std::string name = (fs::temp_directory_path() / "attnd_storage_XXXXXX").string();
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  ~Storage() override { fs::remove_all(directory_); }

  EngineOptions SpillOptions(int64_t blocks) {
    EngineOptions options = Harness::DefaultOptions();
    options.kv_cache_bytes = blocks * kTinyBlock;
    options.evict_lru = true;
    options.spill_dir = (directory_ / "spill").string();
    return options;
  }
  fs::path File(const std::string& id) { return directory_ / "spill" / (id + ".attnd"); }
  int Files(const fs::path& directory) {
    int count = 0;
    for (const auto& entry : fs::directory_iterator(directory)) count += entry.path().extension() == ".attnd" ? 1 : 0;
    return count;
  }
  // Steps of other sessions until this one is on disk.
  void Push(Harness* h, const std::string& id) {
    for (int i = 0; i < 1000 && h->engine->GetSession(id)->spilled_bytes == 0; i++) {
      const std::string other = h->Create();
      ASSERT_TRUE(h->Mean(other, {1}).status.ok());
    }
    ASSERT_GT(h->engine->GetSession(id)->spilled_bytes, 0);
  }

  fs::path directory_;
};

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

TEST_F(Storage, ASecondFileOfASessionIsRemovedBeforeItIsOfThePast) {
  std::string id;
  const std::string saved = (directory_ / "saved").string();
  {
    Harness h(SpillOptions(4));
    id = h.Create();
    ASSERT_TRUE(h.Mean(id, {1, 2, 3}).status.ok());
    ASSERT_TRUE(h.engine->Drain(absl::Now() + absl::Seconds(5)));
    ASSERT_EQ(h.engine->SaveSessions(saved, [] { return false; })->saved, 1);
  }
  fs::copy_file(directory_ / "saved" / (id + ".attnd"), File(id));
  Harness h(SpillOptions(4));
  for (const std::string& directory : {saved, (directory_ / "spill").string()}) {
    const auto report = h.engine->RestoreSessions(directory);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->saved, directory == saved ? 1 : 0);
    EXPECT_EQ(report->lost, 0);
    EXPECT_EQ(h.engine->RestoreSessions(directory)->lost, 0);  // once more
  }
  EXPECT_FALSE(fs::exists(File(id)));
  EXPECT_TRUE(fs::exists(directory_ / "saved" / (id + ".attnd")));
  EXPECT_THAT(h.Mean(id, {6}).out, ElementsAre(3));
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

TEST_F(Storage, ADrainThatEndsWhileASessionComesBackLosesItNot) {
  const std::string saved = (directory_ / "saved").string();
  std::string id;
  {
    Harness h;
    id = h.Create();
    ASSERT_TRUE(h.Mean(id, {1, 2, 3}).status.ok());
    ASSERT_EQ(h.engine->SaveSessions(saved, [] { return false; })->saved, 1);
  }
  for (int round = 0; round < 2; round++) {
    absl::Notification reads, go_on;
    EngineOptions options = Harness::DefaultOptions();
    std::atomic<bool> hold = false;
    options.fail_io = [&](const char* call) {
      if (hold && std::string(call) == "read") {
        hold = false;
        reads.Notify();
        go_on.WaitForNotification();
      }
      return 0;
    };
    Harness h(options);
    ASSERT_EQ(h.engine->RestoreSessions(saved)->saved, 1);
    hold = true;
    std::future<StepAnswer> step = h.Start(Harness::MeanArgs(id, {6}));
    reads.WaitForNotification();
    EXPECT_FALSE(h.engine->Drain(absl::Now()));
    EXPECT_EQ(step.get().reason(), "DRAINING");
    std::thread opener([&] {
      absl::SleepFor(absl::Milliseconds(50));
      go_on.Notify();
    });
    const auto report = h.engine->SaveSessions(saved, [&] { return round == 1; });  // it lies there already
    opener.join();
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->saved, 1);
    EXPECT_EQ(report->lost, 0);
  }
  Harness h;
  ASSERT_EQ(h.engine->RestoreSessions(saved)->saved, 1);
  EXPECT_THAT(h.Mean(id, {6}).out, ElementsAre(3));
}

TEST_F(Storage, ADirectoryThatIsGoneAtTheEndIsAFailureAndSoIsTheSpillDirectory) {
  const fs::path saved = directory_ / "saved";
  Harness h(SpillOptions(4));
  const std::string id = h.Create();
  ASSERT_TRUE(h.engine->PrepareToSave(saved.string()).ok());
  fs::remove_all(saved);
  const auto report = h.engine->SaveSessions(saved.string(), [] { return false; });
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->saved, 0);
  EXPECT_EQ(report->lost, 1);
  EXPECT_THAT(report->first_error, HasSubstr("No such file"));
  fs::create_symlink(directory_ / "spill", directory_ / "link");
  const std::string link = (directory_ / "link").string();
  EXPECT_EQ(h.engine->PrepareToSave(link).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(h.engine->SaveSessions(link, [] { return false; }).ok());
  EXPECT_FALSE(h.engine->RestoreSessions(link).ok());
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

TEST_F(Storage, SavedSessionsKeepTheirOrder) {
  const std::string saved = (directory_ / "saved").string();
  std::vector<std::string> ids;
  {
    Harness h;
    for (int i = 0; i < 20; i++) ids.push_back(h.Create());
    ASSERT_EQ(h.engine->SaveSessions(saved, [] { return false; })->saved, 20);
  }
  Harness h;
  ASSERT_EQ(h.engine->RestoreSessions(saved)->saved, 20);
  const std::vector<SessionInfo> listed = h.engine->ListSessions(0, 100);
  ASSERT_EQ(listed.size(), ids.size());
  for (size_t i = 0; i < ids.size(); i++) EXPECT_EQ(listed[i].session_id, ids[i]) << i;
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

TEST_F(Storage, WhatIsSavedIsServedByALaterProcessBitForBit) {
  SessionConfig config;
  config.num_layers = 3;
  config.heads = {4, 2};
  config.shape = {40, 24, KvDType::kBf16};
  config.softmax_scale = 0.2f;
  config.reserve_tokens = 256;
  const auto step = [&](Harness* h, const std::string& id, int layer, int tokens, uint64_t seed) {
    StepArgs args;
    args.layer = layer;
    args.segments.push_back({id, tokens, {}, false, {}});
    args.q = RandomFloats(seed, size_t(tokens) * 4 * 40);
    args.k = RandomFloats(seed + 1, size_t(tokens) * 2 * 40);
    args.v = RandomFloats(seed + 2, size_t(tokens) * 2 * 24);
    return h->Step(std::move(args)).out;
  };
  const std::string saved = (directory_ / "saved").string();
  Harness undisturbed;
  const std::string twin = undisturbed.Create(config);
  std::string id, empty;
  {
    EngineOptions options = SpillOptions(1);
    options.kv_cache_bytes = int64_t{8} << 20;
    Harness h(options);
    id = h.Create(config);
    empty = h.Create();
    for (int layer = 0; layer < 3; layer++) {
      EXPECT_EQ(step(&h, id, layer, 70 + layer, 10 + layer), step(&undisturbed, twin, layer, 70 + layer, 10 + layer));
    }
    ASSERT_TRUE(h.engine->Drain(absl::Now() + absl::Seconds(5)));
    const auto report = h.engine->SaveSessions(saved, [] { return false; });
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->saved, 2);
    EXPECT_EQ(report->lost, 0);
    EXPECT_EQ(h.observer["snapshot drain"], 2);
  }
  {
    EngineOptions options = Harness::DefaultOptions();
    options.compute_threads = 1;
    Harness h(options);
    const auto report = h.engine->RestoreSessions(saved);
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_EQ(report->saved, 2);
    EXPECT_EQ(h.observer["restored"], 2);
    EXPECT_EQ(h.engine->stats().sessions_active, 2);
    EXPECT_THAT(h.engine->GetSession(id)->layer_lengths, ElementsAre(70, 71, 72));
    EXPECT_EQ(h.Mean(empty, {4}).out, std::vector<float>{4});
    for (int layer = 0; layer < 3; layer++) {
      EXPECT_EQ(step(&h, id, layer, 3, 20 + layer), step(&undisturbed, twin, layer, 3, 20 + layer));
    }
    EXPECT_GE(h.engine->GetSession(id)->reserved_bytes, h.engine->GetSession(id)->used_bytes);
    EXPECT_EQ(Files(saved), 0);
    // A process at a time.
    Harness other;
    EXPECT_FALSE(other.engine->RestoreSessions(saved).ok());
  }
}

TEST_F(Storage, WhatAKilledProcessHadSpilledIsServedAgain) {
  std::string id;
  {
    Harness h(SpillOptions(4));
    id = h.Create();
    ASSERT_TRUE(h.Mean(id, {1, 2, 3}).status.ok());
    Push(&h, id);
    ASSERT_TRUE(fs::exists(File(id)));
  }
  {
    std::ofstream(File(std::string(32, 'a'))) << "half a snapshot";
    Harness h(SpillOptions(4));
    const auto report = h.engine->RestoreSessions((directory_ / "spill").string());
    ASSERT_TRUE(report.ok()) << report.status();
    EXPECT_GE(report->saved, 1);
    EXPECT_EQ(report->lost, 1);
    EXPECT_THAT(report->first_error, HasSubstr(std::string(32, 'a')));
    EXPECT_THAT(h.Mean(id, {6}).out, ElementsAre(3));
    EXPECT_EQ(h.Mean(std::string(32, 'a'), {6}).status.code(), absl::StatusCode::kDataLoss);
    Push(&h, id);
  }
  // A restart of the machine may have undone what the disk was not asked to keep.
  std::ofstream(directory_ / "spill" / "boot_id") << "another\n";
  Harness h(SpillOptions(4));
  EXPECT_EQ(h.engine->RestoreSessions((directory_ / "spill").string())->saved, 0);
  EXPECT_EQ(h.Mean(id, {6}).reason(), "NEVER_EXISTED");
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

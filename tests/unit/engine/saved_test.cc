// Sessions that a later process serves: saved at the end, or left on disk by a process that was killed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/unit/engine/storage_fixture.h"

namespace attnd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Saved = StorageFixture;

TEST_F(Saved, ASecondFileOfASessionIsRemovedBeforeItIsOfThePast) {
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

TEST_F(Saved, ADrainThatEndsWhileASessionComesBackLosesItNot) {
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

TEST_F(Saved, ADirectoryThatIsGoneAtTheEndIsAFailureAndSoIsTheSpillDirectory) {
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

TEST_F(Saved, SavedSessionsKeepTheirOrder) {
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

TEST_F(Saved, WhatIsSavedIsServedByALaterProcessBitForBit) {
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

TEST_F(Saved, WhatAKilledProcessHadSpilledIsServedAgain) {
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

}  // namespace
}  // namespace attnd

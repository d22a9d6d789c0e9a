// Sessions leave as snapshots and come back: the same state, the same bits, of one moment, whatever goes on meanwhile.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "kernels/block_layout.h"
#include "tests/unit/engine/transfer_harness.h"

namespace attnd {
namespace {

using ::testing::ElementsAre;

constexpr HeadCounts kHeads = {6, 2};
constexpr int kHeadDim = 40, kValueDim = 72, kLayers = 2;

SessionConfig Config(KvDType dtype, int64_t window = 0) {
  SessionConfig config;
  config.num_layers = kLayers;
  config.heads = kHeads;
  config.shape = {kHeadDim, kValueDim, dtype};
  config.softmax_scale = 1 / std::sqrt(static_cast<float>(kHeadDim));
  config.softcap = 20;
  config.sinks = {0.5f, 0, -1, 2, 0.25f, 1};
  config.layer_windows = {window, 0};
  config.max_tokens = 5000;
  config.ttl = absl::Minutes(7);
  return config;
}

StepArgs RandomStep(const std::string& id, int layer, int64_t tokens, uint64_t seed) {
  StepArgs args;
  args.layer = layer;
  args.segments.resize(1);
  args.segments[0].session_id = id;
  args.segments[0].num_tokens = tokens;
  args.q = RandomFloats(seed, tokens * kHeads.num_q_heads * kHeadDim);
  args.k = RandomFloats(seed + 1, tokens * kHeads.num_kv_heads * kHeadDim);
  args.v = RandomFloats(seed + 2, tokens * kHeads.num_kv_heads * kValueDim);
  args.return_lse = true;
  return args;
}

EngineOptions WithThreads(int threads) {
  EngineOptions options = Harness::DefaultOptions();
  options.compute_threads = threads;
  return options;
}

// The twin is the session that stayed: every further answer is its bits.
void ExpectTwins(Harness* a, const std::string& id_a, Harness* b, const std::string& id_b) {
  for (const int64_t tokens : {1, 100, 1, 7}) {
    for (int layer = 0; layer < kLayers; layer++) {
      const StepAnswer x = a->Step(RandomStep(id_a, layer, tokens, 1000 + tokens));
      const StepAnswer y = b->Step(RandomStep(id_b, layer, tokens, 1000 + tokens));
      ASSERT_TRUE(x.status.ok() && y.status.ok()) << x.status << y.status;
      EXPECT_EQ(x.out, y.out) << tokens << " tokens in layer " << layer;
      EXPECT_EQ(x.lse, y.lse);
      EXPECT_EQ(x.segments[0].length, y.segments[0].length);
    }
  }
}

void ExpectSameSession(const SessionInfo& a, const SessionInfo& b) {
  EXPECT_EQ(a.layer_lengths, b.layer_lengths);
  EXPECT_EQ(a.layer_first_tokens, b.layer_first_tokens);
  EXPECT_EQ(a.used_bytes, b.used_bytes);
  EXPECT_EQ(a.config.layer_windows, b.config.layer_windows);
  EXPECT_EQ(a.config.sinks, b.config.sinks);
  EXPECT_EQ(a.config.softcap, b.config.softcap);
  EXPECT_EQ(a.config.max_tokens, b.config.max_tokens);
  EXPECT_EQ(a.config.ttl, b.config.ttl);
  EXPECT_NE(a.session_id, b.session_id);
}

class TransferTest : public ::testing::TestWithParam<KvDType> {};

TEST_P(TransferTest, AnotherEngineGoesOnWithTheSameBits) {
  Harness here(WithThreads(1)), there(WithThreads(3));
  const std::string id = here.Create(Config(GetParam()));
  ASSERT_TRUE(here.Step(RandomStep(id, 0, 200, 1)).status.ok());
  ASSERT_TRUE(here.Step(RandomStep(id, 1, 130, 4)).status.ok());
  const absl::StatusOr<SessionInfo> copy = Import(&there, Export(&here, id));
  ASSERT_TRUE(copy.ok()) << copy.status();
  ExpectSameSession(*copy, here.engine->GetSession(id).value());
  ExpectTwins(&here, id, &there, copy->session_id);
  EXPECT_EQ(there.observer["imported"], 1);
  EXPECT_EQ(there.observer["snapshot import"], 1);
  EXPECT_EQ(here.observer["snapshot export"], 1);
  EXPECT_TRUE(there.engine->CloseSession(copy->session_id).value());
  EXPECT_EQ(there.used_bytes(), 0);
}

INSTANTIATE_TEST_SUITE_P(EveryDType, TransferTest,
                         ::testing::Values(KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8));

TEST(Transfer, AWindowedSessionComesWithoutWhatItHasFreed) {
  Harness here, there;
  const std::string id = here.Create(Config(KvDType::kF32, /*window=*/100));
  for (int step = 0; step < 5; step++) {
    for (int layer = 0; layer < kLayers; layer++) {
      ASSERT_TRUE(here.Step(RandomStep(id, layer, 90, 10 * step)).status.ok());
    }
  }
  const SessionInfo info = here.engine->GetSession(id).value();
  ASSERT_GT(info.layer_first_tokens[0], 0);
  const absl::StatusOr<SessionInfo> copy = Import(&there, Export(&here, id));
  ASSERT_TRUE(copy.ok()) << copy.status();
  ExpectSameSession(*copy, info);
  ExpectTwins(&here, id, &there, copy->session_id);
}

TEST(Transfer, S17_AnEmptySessionComesBackEmpty) {
  Harness h;
  const std::string id = h.Create();
  const absl::StatusOr<SessionInfo> copy = Import(&h, Export(&h, id));
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_THAT(copy->layer_lengths, ElementsAre(0));
  EXPECT_THAT(h.Mean(copy->session_id, {4}).out, ElementsAre(4.0f));
}

TEST(Transfer, ExportsOfASessionThatStaysAreEqual) {
  Harness h;
  const std::string id = h.Create();
  h.Mean(id, {1, 2, 3});
  const std::string first = Export(&h, id), second = Export(&h, id);
  EXPECT_EQ(first, second);
  // So are those of a copy: nothing of what the memory held before is in them.
  EXPECT_EQ(Export(&h, Import(&h, first).value().session_id), first);
  EXPECT_EQ(first.find(id), std::string::npos);
}

TEST(Transfer, AnExportIsOfOneMomentBehindItsQueuedSteps) {
  EngineOptions options = Harness::DefaultOptions();
  Gate gate;
  options.compute_hook = gate.hook();
  Harness h(options);
  const std::string id = h.Create();
  auto before = h.Start(Harness::MeanArgs(id, {1, 2, 3}));
  gate.AwaitArrival();
  auto exported = StartExport(&h, id);
  auto after = h.Start(Harness::MeanArgs(id, {6}));
  EXPECT_EQ(exported.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  gate.Open();
  EXPECT_THAT(after.get().out, ElementsAre(3.0f));
  const ExportResult source = exported.get();
  ASSERT_TRUE(source.ok()) << source.status();
  const absl::StatusOr<SessionInfo> copy = Import(&h, ReadAll(source->get()));
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_THAT(copy->layer_lengths, ElementsAre(3));
  EXPECT_THAT(h.Mean(copy->session_id, {6}).out, ElementsAre(3.0f));
  EXPECT_EQ(h.Length(id), 4);
}

// Steps, a rewind and the end of the session do not reach the snapshot, and it gives its memory back when it is done.
TEST(Transfer, ASessionThatIsExportedMayBeChangedAndClosed) {
  Harness h;
  const std::string id = h.Create();
  h.Mean(id, {1, 2, 3});
  const std::string expected = Export(&h, id);
  ExportResult source = StartExport(&h, id).get();
  ASSERT_TRUE(source.ok());
  EXPECT_THAT(h.Mean(id, {6}).out, ElementsAre(3.0f));
  EXPECT_GT(h.engine->stats().used_bytes, 512) << "the shared block was written to";
  EXPECT_TRUE(h.Rewind(id, 1).ok());
  EXPECT_TRUE(h.engine->CloseSession(id).value());
  EXPECT_EQ(h.used_bytes(), 512);
  EXPECT_EQ(ReadAll(source->get()), expected);
  EXPECT_EQ((*source)->Next().value(), "") << "the end stays the end";
  EXPECT_EQ(h.observer["snapshot export"], 2);
  source->reset();
  EXPECT_EQ(h.used_bytes(), 0);
}

TEST(Transfer, AnExportInPlaceCountsNoTokenTwiceAndNoBlockTwice) {
  Harness h;
  const std::string id = h.Create();
  h.Mean(id, std::vector<float>(100, 1));
  const int64_t used = h.used_bytes();
  {
    const ExportResult source = StartExport(&h, id).get();
    const EngineStats stats = h.engine->stats();
    EXPECT_EQ(stats.used_bytes, used);
    EXPECT_EQ(stats.shared_bytes, used);
    EXPECT_EQ(stats.cache_tokens, 100);
    EXPECT_EQ(stats.sessions_active, 1);
  }
  EXPECT_EQ(h.engine->stats().shared_bytes, 0);
  EXPECT_EQ(h.engine->stats().cache_tokens, 100);
  EXPECT_EQ(h.observer["snapshot export"], 0);  // it was given up
}

TEST(Transfer, AReservationComesWithItsSession) {
  EngineOptions options = Harness::DefaultOptions();
  options.kv_cache_bytes = 64 * 512;
  Harness h(options);
  SessionConfig config = TinyConfig();
  config.reserve_tokens = 20 * kBlockTokens;
  const std::string id = h.Create(config);
  h.Mean(id, {1, 2, 3});
  const std::string bytes = Export(&h, id);
  const absl::StatusOr<SessionInfo> copy = Import(&h, bytes);
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(copy->reserved_bytes, 20 * 512);
  EXPECT_EQ(copy->used_bytes, 512);
  EXPECT_TRUE(Import(&h, bytes).ok());
  EXPECT_EQ(ReasonOf(Import(&h, bytes).status()), "CACHE_FULL");
  EXPECT_EQ(h.engine->stats().reserved_bytes, 60 * 512);
}

TEST(Transfer, GoneAndUnknownSessionsAreNotExported) {
  Harness h;
  const std::string id = h.Create();
  EXPECT_TRUE(h.engine->CloseSession(id).value());
  EXPECT_EQ(ReasonOf(StartExport(&h, id).get().status()), "CLOSED");
  EXPECT_EQ(ReasonOf(StartExport(&h, std::string(32, '0')).get().status()), "NEVER_EXISTED");
  EXPECT_EQ(ReasonOf(StartExport(&h, "x").get().status()), "BAD_SESSION_ID");
  EXPECT_TRUE(h.engine->Drain(absl::InfiniteFuture()));
  EXPECT_EQ(ReasonOf(StartExport(&h, id).get().status()), "CLOSED");
}

TEST(Transfer, AnImportDropsWhoWasIdleLongestWhereThatIsAllowed) {
  EngineOptions options = Harness::DefaultOptions();
  options.kv_cache_bytes = 3 * 512;
  options.evict_lru = true;
  Harness h(options);
  const std::string a = h.Create(), b = h.Create();
  h.Mean(a, {1, 2, 3});
  h.Mean(b, std::vector<float>(100, 1));  // two blocks
  const std::string bytes = Export(&h, a);
  EXPECT_THAT(h.Mean(a, {6}).out, ElementsAre(3.0f));  // b is the oldest now
  const absl::StatusOr<SessionInfo> copy = Import(&h, bytes);
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_THAT(h.Mean(copy->session_id, {6}).out, ElementsAre(3.0f));
  EXPECT_EQ(h.Mean(b, {1}).reason(), "EVICTED");
  EXPECT_EQ(h.Length(a), 4);
}

TEST(Transfer, SessionsOnDiskAreExportedAndImportsSendOthersThere) {
  std::string directory = testing::TempDir() + "/attnd_transfer_XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  EngineOptions options = Harness::DefaultOptions();
  options.kv_cache_bytes = 4 * 512;
  options.evict_lru = true;
  options.spill_dir = directory;
  {
    Harness h(options);
    const std::string a = h.Create();
    h.Mean(a, {1, 2, 3});
    const std::string bytes = Export(&h, a);
    for (int i = 0; i < 100 && h.engine->GetSession(a)->spilled_bytes == 0; i++) {
      const std::string other = h.Create();
      h.Mean(other, {1});
    }
    ASSERT_GT(h.engine->GetSession(a)->spilled_bytes, 0);
    EXPECT_EQ(Export(&h, a), bytes);
    // While others are on their way to disk an import is told to come again.
    absl::StatusOr<SessionInfo> copy;
    for (int i = 0; i < 200; i++) {
      copy = Import(&h, bytes);
      if (copy.ok()) break;
      ASSERT_EQ(ReasonOf(copy.status()), "CACHE_FULL");
      absl::SleepFor(absl::Milliseconds(5));
    }
    ASSERT_TRUE(copy.ok()) << copy.status();
    EXPECT_THAT(h.Mean(copy->session_id, {6}).out, ElementsAre(3.0f));
    EXPECT_THAT(h.Mean(a, {6}).out, ElementsAre(3.0f));
    EXPECT_EQ(h.observer["evicted"], 0);
  }
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace attnd

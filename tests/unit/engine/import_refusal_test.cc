// Imports that come to nothing: they say why, and leave the engine as it was.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "kernels/block_layout.h"
#include "server/engine/session_snapshot.h"
#include "tests/unit/engine/transfer_harness.h"

namespace attnd {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kTinyBlock = 512;

// Whatever is done with it, a session of 1, 2, 3 must still answer 3.0 to a 6, and the gauges stay where they are.
class ImportRefusal : public ::testing::Test {
 protected:
  explicit ImportRefusal(const EngineOptions& options = Harness::DefaultOptions()) : h_(options) {
    id_ = h_.Create();
    h_.Mean(id_, {1, 2, 3});
    bytes_ = Export(&h_, id_);
  }
  void ExpectAsBefore() {
    const EngineStats stats = h_.engine->stats();
    EXPECT_EQ(stats.used_bytes, kTinyBlock);
    EXPECT_EQ(stats.reserved_bytes, kTinyBlock);
    EXPECT_EQ(stats.cache_tokens, 3);
    EXPECT_EQ(stats.sessions_active, 1);
    EXPECT_EQ(h_.Length(id_), 3);
  }
  // The reason; nothing may have changed.
  std::string Refused(absl::string_view bytes, const std::optional<SessionConfig>& expected = {}) {
    const absl::StatusOr<SessionInfo> info = Import(&h_, bytes, expected);
    EXPECT_FALSE(info.ok());
    ExpectAsBefore();
    message_ = std::string(info.status().message());
    details_ = GetErrorDetails(info.status());
    return details_.reason;
  }

  Harness h_;
  std::string id_, bytes_, message_;
  ErrorDetails details_;
};

TEST_F(ImportRefusal, S17_EveryTruncation) {
  for (size_t size = 0; size < bytes_.size(); size++) {
    EXPECT_EQ(Refused(absl::string_view(bytes_).substr(0, size)), "BAD_SNAPSHOT") << size;
    EXPECT_EQ(details_.metadata["offset"], std::to_string(size));
  }
  EXPECT_THAT(message_, HasSubstr("of " + std::to_string(bytes_.size()) + " bytes"));
  EXPECT_THAT(h_.Mean(id_, {6}).out, ElementsAre(3.0f));
}

TEST_F(ImportRefusal, S17_EveryFlippedByte) {
  for (size_t i = 0; i < bytes_.size(); i++) {
    std::string flipped = bytes_;
    flipped[i] ^= 0x10;
    EXPECT_EQ(Refused(flipped), "BAD_SNAPSHOT") << "byte " << i << ": " << message_;
  }
  EXPECT_EQ(h_.observer["failed import"], static_cast<int64_t>(bytes_.size()));
  EXPECT_THAT(h_.Mean(id_, {6}).out, ElementsAre(3.0f));
}

TEST_F(ImportRefusal, BytesBehindTheEnd) { EXPECT_EQ(Refused(bytes_ + "x"), "BAD_SNAPSHOT"); }

TEST_F(ImportRefusal, AVersionOfTheFutureByName) {
  bytes_[8] = 2;  // behind the magic
  EXPECT_EQ(Refused(bytes_), "BAD_SNAPSHOT");
  EXPECT_THAT(message_, HasSubstr("version 2"));
}

TEST_F(ImportRefusal, AConfigurationThatIsNotTheExpectedOne) {
  const auto refused = [&](void (*change)(SessionConfig*), const std::string& field) {
    SessionConfig expected = TinyConfig();
    change(&expected);
    EXPECT_EQ(Refused(bytes_, expected), "BAD_CONFIG");
    EXPECT_EQ(details_.metadata["field"], field);
    EXPECT_THAT(message_, HasSubstr(field));
  };
  refused([](SessionConfig* c) { c->num_layers = 2; }, "num_layers");
  refused([](SessionConfig* c) { c->heads = {2, 1}; }, "num_q_heads");
  refused([](SessionConfig* c) { c->heads = {1, 2}; }, "num_kv_heads");
  refused([](SessionConfig* c) { c->shape.head_dim = 2; }, "head_dim");
  refused([](SessionConfig* c) { c->shape.value_dim = 2; }, "value_dim");
  refused([](SessionConfig* c) { c->shape.dtype = KvDType::kBf16; }, "kv_dtype");
  EXPECT_THAT(message_, HasSubstr("kv_dtype F32, expected was BF16"));
  EXPECT_TRUE(Import(&h_, bytes_, TinyConfig()).ok());
}

TEST_F(ImportRefusal, OneThatIsGivenUpGivesEverythingBack) {
  std::unique_ptr<SessionImport> target = h_.engine->ImportSession({});
  ASSERT_TRUE(target->Write(absl::string_view(bytes_).substr(0, bytes_.size() - 1)).ok());
  EXPECT_EQ(h_.used_bytes(), 2 * kTinyBlock) << "its memory is taken";
  EXPECT_EQ(h_.engine->stats().sessions_active, 1) << "but nobody can see it";
  EXPECT_EQ(h_.engine->ListSessions(0, 10).size(), 1u);
  target.reset();
  ExpectAsBefore();
  EXPECT_EQ(h_.observer["failed import"], 0) << "its client went away";
}

TEST_F(ImportRefusal, ADrainRefusesItAtItsHeaderAndAtItsEnd) {
  std::unique_ptr<SessionImport> target = h_.engine->ImportSession({});
  ASSERT_TRUE(target->Write(bytes_).ok());
  EXPECT_TRUE(h_.engine->Drain(absl::InfiniteFuture()));
  EXPECT_EQ(ReasonOf(Import(&h_, bytes_).status()), "DRAINING");
  const absl::StatusOr<SessionInfo> info = Finish(target.get()).get();
  EXPECT_EQ(info.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(info.status()), "DRAINING");
  target.reset();
  ExpectAsBefore();
}

// A snapshot as it would be of a session that never was.
std::string MadeUp(const SessionConfig& config, std::vector<int64_t> lengths, std::vector<int64_t> first_tokens) {
  SnapshotLayout layout;
  layout.shape = config.shape;
  layout.num_kv_heads = config.heads.num_kv_heads;
  layout.lengths = std::move(lengths);
  layout.first_tokens = std::move(first_tokens);
  const SnapshotHeader header = MakeSnapshotHeader(layout, {.config = config, .identity = {}});
  // Of its blocks only the header's count is looked at before the memory is taken, so an empty cache can write it.
  auto pool = BlockPool::Create({.capacity_bytes = 1 << 20});
  SessionCache empty(pool->get(), BlockLayout(config.shape).block_bytes, config.num_layers, config.heads.num_kv_heads);
  SnapshotWriter writer(empty, BlockLayout(config.shape), header);
  std::string bytes;
  EXPECT_TRUE(writer.Next(&bytes));
  empty.Release(1);
  return bytes;
}

TEST_F(ImportRefusal, WhatCanNeverFit) {
  SessionConfig config = TinyConfig();
  EXPECT_EQ(Refused(MadeUp(config, {int64_t{1} << 30}, {0})), "TOO_MANY_TOKENS");
  EXPECT_EQ(details_.retry_delay, absl::ZeroDuration());
  // Few blocks, but tables for all that a window has freed.
  config.layer_windows = {64};
  EXPECT_EQ(Refused(MadeUp(config, {int64_t{1} << 30}, {(int64_t{1} << 30) - 64})), "TOO_MANY_TOKENS");
  EXPECT_THAT(message_, HasSubstr("block tables"));
  config = TinyConfig();
  config.reserve_tokens = int64_t{1} << 30;
  EXPECT_EQ(Refused(MadeUp(config, {0}, {0})), "TOO_MANY_TOKENS");
}

TEST_F(ImportRefusal, LayersThatTheConfigurationDoesNotAllow) {
  EXPECT_EQ(Refused(MadeUp(TinyConfig(), {100}, {64})), "BAD_SNAPSHOT");
  EXPECT_THAT(message_, HasSubstr("no window"));
}

class FullImportRefusal : public ImportRefusal {
 protected:
  static EngineOptions Options() {
    EngineOptions options = Harness::DefaultOptions();
    options.kv_cache_bytes = 4 * kTinyBlock;
    options.max_sessions = 2;
    return options;
  }
  FullImportRefusal() : ImportRefusal(Options()) {}
};

TEST_F(FullImportRefusal, WhatDoesNotFitNowMayComeAgain) {
  const std::string big = h_.Create();
  h_.Mean(big, std::vector<float>(3 * kBlockTokens, 1));
  const std::string bytes = Export(&h_, big);
  EXPECT_TRUE(h_.engine->CloseSession(big).value());
  std::unique_ptr<SessionImport> other = h_.engine->ImportSession({});
  ASSERT_TRUE(other->Write(bytes_).ok());
  const absl::StatusOr<SessionInfo> info = Import(&h_, bytes);
  EXPECT_EQ(ReasonOf(info.status()), "SESSION_LIMIT") << "one on its way holds a place";
  EXPECT_EQ(ReasonOf(h_.TryCreate(TinyConfig()).status()), "SESSION_LIMIT");
  other.reset();
  SessionConfig reserving = TinyConfig();
  reserving.reserve_tokens = kBlockTokens;
  const std::string reserved = h_.Create(reserving);
  EXPECT_EQ(ReasonOf(Import(&h_, bytes).status()), "SESSION_LIMIT");
  EXPECT_TRUE(h_.engine->CloseSession(reserved).value());

  h_.Mean(id_, std::vector<float>(kBlockTokens, 1));  // a second block
  const absl::StatusOr<SessionInfo> full = Import(&h_, bytes);
  EXPECT_EQ(ReasonOf(full.status()), "CACHE_FULL");
  EXPECT_GT(GetErrorDetails(full.status()).retry_delay, absl::ZeroDuration());
  EXPECT_THAT(std::string(full.status().message()), HasSubstr("needs 1536 bytes of cache, 1024 are available of 2048"));
  EXPECT_EQ(h_.used_bytes(), 2 * kTinyBlock);
  EXPECT_TRUE(h_.Rewind(id_, 3).ok());
  const absl::StatusOr<SessionInfo> now = Import(&h_, bytes);
  ASSERT_TRUE(now.ok()) << now.status();
  EXPECT_EQ(h_.used_bytes(), 4 * kTinyBlock);
}

// The kernels of a shape that no session had are made on the compute thread, which may be told to stop before.
TEST(ImportOfANewShape, ADrainThatIsOverBeforeItsKernelsAreMade) {
  EngineOptions options = Harness::DefaultOptions();
  Gate gate;
  options.compute_hook = gate.hook();
  Harness h(options), other;
  SessionConfig config = TinyConfig();
  config.shape.head_dim = 8;
  const std::string bytes = Export(&other, other.Create(config));
  const std::string id = h.Create();
  auto step = h.Start(Harness::MeanArgs(id, {1}));
  gate.AwaitArrival();
  std::unique_ptr<SessionImport> target = h.engine->ImportSession({});
  ASSERT_TRUE(target->Write(bytes).ok());
  auto info = Finish(target.get());
  EXPECT_EQ(info.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  EXPECT_FALSE(h.engine->Drain(absl::Now()));
  EXPECT_EQ(ReasonOf(info.get().status()), "DRAINING");
  gate.Open();
  step.get();
  EXPECT_TRUE(h.engine->CloseSession(id).value());
  EXPECT_EQ(h.used_bytes(), 0);
}

}  // namespace
}  // namespace attnd

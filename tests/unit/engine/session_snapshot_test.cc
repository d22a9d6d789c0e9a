// What a snapshot says of its session: nothing is lost on the way, and nothing that was cut, stretched or made up comes
// in.
#include "server/engine/session_snapshot.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"
#include "server/engine/step_plan.h"

namespace attnd {
namespace {

// Every field differs from its default and from its neighbours.
SessionRecord FullRecord() {
  SessionRecord record;
  SessionConfig& c = record.config;
  c.num_layers = 3;
  c.heads = {.num_q_heads = 4, .num_kv_heads = 2};
  c.shape = {.head_dim = 80, .value_dim = 96, .dtype = KvDType::kInt8};
  c.softmax_scale = 0.0883883461f;
  c.softcap = 30.5f;
  c.causal = false;
  c.alibi_slopes = {0.5f, -0.25f, 1e-30f, std::numeric_limits<float>::denorm_min()};
  c.sinks = {-0.0f, 1, 2, std::numeric_limits<float>::max()};
  c.layer_windows = {0, 128, int64_t{1} << 40};
  c.max_tokens = 131072;
  c.ttl = absl::Seconds(90) + absl::Nanoseconds(7);
  c.reserve_tokens = 4096;
  SessionRecord::Identity& i = record.identity.emplace();
  i.id = {0x0123456789abcdef, 0xfedcba9876543210};
  i.create_time = absl::FromUnixNanos(1'700'000'000'123'456'789);
  i.idle_since = absl::FromUnixNanos(1'700'000'111'987'654'321);
  i.sequence = 0xf00000000000000d;
  return record;
}

void ExpectSameBits(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  if (a.empty()) return;  // memcmp may not be given null
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
}

void ExpectSame(const SessionConfig& a, const SessionConfig& b) {
  EXPECT_EQ(a.num_layers, b.num_layers);
  EXPECT_EQ(a.heads.num_q_heads, b.heads.num_q_heads);
  EXPECT_EQ(a.heads.num_kv_heads, b.heads.num_kv_heads);
  EXPECT_EQ(a.shape, b.shape);
  ExpectSameBits({a.softmax_scale, a.softcap}, {b.softmax_scale, b.softcap});
  EXPECT_EQ(a.causal, b.causal);
  ExpectSameBits(a.alibi_slopes, b.alibi_slopes);
  ExpectSameBits(a.sinks, b.sinks);
  EXPECT_EQ(a.layer_windows, b.layer_windows);
  EXPECT_EQ(a.max_tokens, b.max_tokens);
  EXPECT_EQ(a.ttl, b.ttl);
  EXPECT_EQ(a.reserve_tokens, b.reserve_tokens);
}

void ExpectRefused(const std::string& bytes, const std::string& part_of_message) {
  const absl::StatusOr<SessionRecord> record = DecodeSessionRecord(bytes);
  ASSERT_FALSE(record.ok()) << part_of_message;
  EXPECT_EQ(record.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(GetErrorDetails(record.status()).reason, "BAD_SNAPSHOT");
  EXPECT_NE(record.status().message().find(part_of_message), absl::string_view::npos) << record.status();
}

TEST(SessionSnapshot, EveryFieldComesBack) {
  const SessionRecord record = FullRecord();
  ASSERT_TRUE(ValidateConfig(record.config).ok());
  const absl::StatusOr<SessionRecord> back = DecodeSessionRecord(EncodeSessionRecord(record));
  ASSERT_TRUE(back.ok()) << back.status();
  ExpectSame(record.config, back->config);
  ASSERT_TRUE(back->identity.has_value());
  EXPECT_EQ(back->identity->id, record.identity->id);
  EXPECT_EQ(back->identity->create_time, record.identity->create_time);
  EXPECT_EQ(back->identity->idle_since, record.identity->idle_since);
  EXPECT_EQ(back->identity->sequence, record.identity->sequence);
}

TEST(SessionSnapshot, ARecordWithoutIdentityAndForeverComesBack) {
  SessionRecord record;
  record.config.num_layers = 1;
  record.config.heads = {1, 1};
  record.config.shape = {1, 1, KvDType::kF32};
  record.config.ttl = absl::InfiniteDuration();
  const absl::StatusOr<SessionRecord> back = DecodeSessionRecord(EncodeSessionRecord(record));
  ASSERT_TRUE(back.ok()) << back.status();
  ExpectSame(record.config, back->config);
  EXPECT_FALSE(back->identity.has_value());
}

TEST(SessionSnapshot, EqualSessionsGiveEqualBytes) {
  EXPECT_EQ(EncodeSessionRecord(FullRecord()), EncodeSessionRecord(FullRecord()));
}

TEST(SessionSnapshot, EveryTruncationIsRefused) {
  const std::string bytes = EncodeSessionRecord(FullRecord());
  for (size_t length = 0; length < bytes.size(); length++) {
    ExpectRefused(bytes.substr(0, length), absl::StrCat("ends after ", length, " bytes"));
  }
}

TEST(SessionSnapshot, BytesBehindTheRecordAreRefused) {
  ExpectRefused(EncodeSessionRecord(FullRecord()) + std::string(3, '\0'), "3 bytes too many");
}

TEST(SessionSnapshot, AnotherVersionIsRefusedByName) {
  std::string bytes = EncodeSessionRecord(FullRecord());
  bytes[0] = 2;
  ExpectRefused(bytes, "version 2; this server reads version 1");
}

TEST(SessionSnapshot, NumbersThatAreNoConfigurationAreRefused) {
  const auto refused = [](void (*change)(SessionConfig*), const std::string& part_of_message) {
    SessionRecord record = FullRecord();
    change(&record.config);
    ExpectRefused(EncodeSessionRecord(record), part_of_message);
  };
  refused([](SessionConfig* c) { c->num_layers = 1025; }, "num_layers must be 1 to 1024, got 1025");
  refused([](SessionConfig* c) { c->heads.num_kv_heads = 3; }, "multiple of num_kv_heads");
  refused([](SessionConfig* c) { c->shape.head_dim = 257; }, "head_dim must be 1 to 256, got 257");
  refused([](SessionConfig* c) { c->shape.value_dim = 0; }, "value_dim must be 1 to 256, got 0");
  refused([](SessionConfig* c) { c->shape.dtype = static_cast<KvDType>(9); }, "kv_dtype 9");
  refused([](SessionConfig* c) { c->softmax_scale = std::numeric_limits<float>::quiet_NaN(); }, "softmax_scale");
  refused([](SessionConfig* c) { c->sinks.pop_back(); }, "sinks");
  refused([](SessionConfig* c) { c->layer_windows[1] = -1; }, "window");
  refused([](SessionConfig* c) { c->max_tokens = -1; }, "max_tokens");
  refused([](SessionConfig* c) { c->ttl = absl::Seconds(-1); }, "ttl");
}

// A count that the bytes cannot hold must not be allocated: with sanitizers, or here by time, it would show.
TEST(SessionSnapshot, ACountBeyondTheBytesIsRefused) {
  std::string bytes = EncodeSessionRecord(FullRecord());
  constexpr size_t kSlopesCount = 4 + 5 * 4 + 2 + 2 * 4;  // behind version, sizes, dtype, causal and two floats
  ASSERT_EQ(bytes[kSlopesCount], 4);
  std::memset(&bytes[kSlopesCount], 0xff, 4);
  ExpectRefused(bytes, "ends after");
}

// Whatever comes in is either refused or a record that is sound and encodes to what it was read from.
TEST(SessionSnapshot, RandomChangesNeverMakeAnUnsoundRecord) {
  const std::string bytes = EncodeSessionRecord(FullRecord());
  std::mt19937 random(20240607);
  int accepted = 0;
  for (int i = 0; i < 20000; i++) {
    std::string changed = bytes;
    for (int n = 1 + static_cast<int>(random() % 3); n > 0; n--) {
      changed[random() % changed.size()] = static_cast<char>(random());
    }
    const absl::StatusOr<SessionRecord> record = DecodeSessionRecord(changed);
    if (!record.ok()) continue;
    accepted++;
    EXPECT_TRUE(ValidateConfig(record->config).ok());
    EXPECT_EQ(EncodeSessionRecord(*record), changed) << "change " << i;
  }
  EXPECT_GT(accepted, 0);  // of an id or a time, any bytes are right
}

// A layer of 3: without a window, with one of 128 tokens, and with one that never passes.
SnapshotHeader FullHeader() {
  const SessionRecord record = FullRecord();
  SnapshotLayout layout;
  layout.shape = record.config.shape;
  layout.num_kv_heads = record.config.heads.num_kv_heads;
  layout.lengths = {300, 1000, 0};
  layout.first_tokens = {0, 832, 0};  // of 1000 tokens the next one sees those from 873 on
  return MakeSnapshotHeader(std::move(layout), record);
}

TEST(SessionSnapshot, AHeaderThatIsMadeIsReadBack) {
  const SnapshotHeader header = FullHeader();
  ASSERT_TRUE(header.layout.Check().ok());
  const absl::StatusOr<SessionRecord> record = ReadSnapshotHeader(header);
  ASSERT_TRUE(record.ok()) << record.status();
  ExpectSame(record->config, FullRecord().config);
}

TEST(SessionSnapshot, LayersThatTheConfigurationDoesNotAllowAreRefused) {
  const auto refused = [](void (*change)(SnapshotLayout*), const std::string& part_of_message) {
    SnapshotHeader header = FullHeader();
    change(&header.layout);
    ASSERT_TRUE(header.layout.Check().ok());  // the cache sees nothing wrong with it
    const absl::StatusOr<SessionRecord> record = ReadSnapshotHeader(header);
    ASSERT_FALSE(record.ok()) << part_of_message;
    EXPECT_EQ(GetErrorDetails(record.status()).reason, "BAD_SNAPSHOT");
    EXPECT_NE(record.status().message().find(part_of_message), absl::string_view::npos) << record.status();
  };
  refused([](SnapshotLayout* l) { l->shape.head_dim = 64; }, "other dimensions");
  refused([](SnapshotLayout* l) { l->shape.dtype = KvDType::kF32; }, "other dimensions");
  refused([](SnapshotLayout* l) { l->num_kv_heads = 4; }, "other dimensions");
  refused([](SnapshotLayout* l) { l->lengths.pop_back(), l->first_tokens.pop_back(); }, "other dimensions");
  refused([](SnapshotLayout* l) { l->lengths[0] = 131073; }, "allows 131072 tokens (max_tokens), layer 0 has 131073");
  refused([](SnapshotLayout* l) { l->first_tokens[0] = 64; }, "layer 0 no window");
  refused([](SnapshotLayout* l) { l->first_tokens[1] = 896; },
          "a window of 128, so its next token sees tokens from 873");
}

TEST(SessionSnapshot, AHeaderOfASessionIsThatOfItsCache) {
  auto pool = BlockPool::Create({.capacity_bytes = 1 << 20});
  ASSERT_TRUE(pool.ok());
  SessionConfig config;
  config.num_layers = 2;
  config.heads = {.num_q_heads = 4, .num_kv_heads = 2};
  config.shape = {.head_dim = 8, .value_dim = 4, .dtype = KvDType::kBf16};
  config.ttl = absl::Minutes(1);
  Session session({7, 9}, 3, std::make_shared<const SessionModel>(config), pool->get());
  session.create_time = absl::FromUnixSeconds(1000);
  session.idle_since = absl::FromUnixSeconds(2000);
  StagedAppend staged;
  ASSERT_TRUE(session.cache.Stage(1, 0, 70, &staged));
  session.cache.Commit(&staged);
  const SnapshotHeader header =
      MakeSnapshotHeader(LayoutOf(session.cache, *session.model), {session.model->config, IdentityOf(session)});
  EXPECT_EQ(header.layout.lengths, (std::vector<int64_t>{0, 70}));
  EXPECT_EQ(header.layout.first_tokens, (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(header.layout.num_kv_heads, 2);
  const absl::StatusOr<SessionRecord> record = ReadSnapshotHeader(header);
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_EQ(record->identity->id, session.id);
  EXPECT_EQ(record->identity->sequence, 3u);
  EXPECT_EQ(record->identity->idle_since, session.idle_since);
  session.cache.Release(100);
}

}  // namespace
}  // namespace attnd

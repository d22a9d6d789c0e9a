// Snapshots with right checksums that this server never writes: what their numbers say is checked before it is
// believed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/cache/snapshot.h"
#include "tests/unit/cache/snapshot_harness.h"

namespace attnd {
namespace {

using testing::HasSubstr;

// Where the header's numbers are; see snapshot.h.
enum Offset : size_t {
  kVersionAt = 8,
  kBodyBytesAt = 12,
  kDTypeAt = 16,
  kHeadDimAt = 20,
  kValueDimAt = 24,
  kNumKvHeadsAt = 28,
  kNumLayersAt = 32,
  kBlockTokensAt = 36,
  kBlockBytesAt = 40,
  kMetadataBytesAt = 44,
  kLengthAt = 48,
  kFirstTokenAt = 56,
};

template <class T>
std::string Patched(std::string bytes, size_t at, T number) {
  std::memcpy(bytes.data() + at, &number, sizeof(number));
  return bytes;
}

// Where the first block is in a snapshot without metadata.
size_t FirstBlock(const TestSession& session) { return kLengthAt + 16 * session.Layout().num_layers() + 8 + 8; }

void ExpectRefused(absl::string_view bytes, const std::string& sentence, bool at_header) {
  for (const size_t piece : {bytes.size(), size_t{1}}) {
    const Restored restored = Restore(bytes, piece);
    EXPECT_EQ(restored.status.code(), absl::StatusCode::kInvalidArgument) << restored.status;
    EXPECT_THAT(std::string(restored.status.message()), HasSubstr(sentence));
    EXPECT_EQ(restored.session == nullptr, at_header);
  }
}

TEST(HostileSnapshot, HeaderNumbersOutOfBoundsAreRefusedBeforeAnythingIsAllocated) {
  auto session = MakeSession({{4, 4, KvDType::kF32}, 2, {100, 64}, {64, 0}}, 1);
  const std::string bytes = session->Snapshot();
  struct Case {
    size_t at;
    std::vector<uint32_t> numbers;
    const char* sentence;
  };
  constexpr uint32_t kMinus1 = 0xffffffff, kLeast = 0x80000000, kMost = 0x7fffffff;
  const Case cases[] = {
      {kVersionAt, {0, 2, kMinus1}, "format version"},
      {kBodyBytesAt, {0, 31, 1u << 20, kLeast, kMinus1}, "header is damaged"},
      {kDTypeAt, {4, kLeast, kMinus1}, "element type"},
      {kHeadDimAt, {0, 257, kMost, kLeast, kMinus1}, "head_dim"},
      {kValueDimAt, {0, 257, kMost, kLeast, kMinus1}, "value_dim"},
      {kNumKvHeadsAt, {0, 4097, kMost, kLeast, kMinus1}, "num_kv_heads"},
      {kNumLayersAt, {0, 1, 3, 1025, kMost, kLeast, kMinus1, 1u << 28}, "layers"},
      {kBlockTokensAt, {0, 32, 128, kMinus1}, "tokens"},
      {kBlockBytesAt, {0, 64, 2112, kLeast, kMinus1}, "bytes"},
      {kMetadataBytesAt, {1, 1u << 18, (1u << 18) + 1, kLeast, kMinus1, kMinus1 - 31}, "metadata"},
  };
  for (const Case& c : cases) {
    for (const uint32_t number : c.numbers) {
      SCOPED_TRACE(testing::Message() << "offset " << c.at << ": " << number);
      std::string hostile = Patched(bytes, c.at, number);
      if (c.at != kBodyBytesAt) hostile = WithRightChecksums(hostile, session->layout.block_bytes);
      ExpectRefused(hostile, c.sentence, true);
    }
  }
}

TEST(HostileSnapshot, LengthsOutOfBoundsAreRefusedBeforeAnythingIsAllocated) {
  auto session = MakeSession({{4, 4, KvDType::kF32}, 2, {100, 64}, {64, 0}}, 1);
  const std::string bytes = session->Snapshot();
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();
  for (const int64_t length : {int64_t{-1}, kLeast, kMost, (int64_t{1} << 30) + 1, int64_t{1} << 32, int64_t{63}}) {
    SCOPED_TRACE(length);
    ExpectRefused(WithRightChecksums(Patched(bytes, kLengthAt, length), session->layout.block_bytes), "layer 0", true);
  }
  for (const int64_t first : {int64_t{-1}, int64_t{-64}, kLeast, kMost, int64_t{1}, int64_t{63}, int64_t{128}}) {
    SCOPED_TRACE(first);
    ExpectRefused(WithRightChecksums(Patched(bytes, kFirstTokenAt, first), session->layout.block_bytes), "layer 0",
                  true);
  }
}

// Each number is in bounds, but not all together.
TEST(HostileSnapshot, MoreBlocksThanAnyServerHoldsAreRefusedBeforeAnythingIsAllocated) {
  const KvShape shape = {256, 256, KvDType::kF32};
  TestSession session(shape, 4096, 1024);
  std::string bytes = session.Snapshot();
  for (int i = 0; i < 1024; i++) bytes = Patched(bytes, kLengthAt + 16 * i, int64_t{1} << 30);
  ExpectRefused(WithRightChecksums(bytes, session.layout.block_bytes), "no server holds more", true);
}

TEST(HostileSnapshot, TheLargestHeaderIsRead) {
  TestSession session({256, 256, KvDType::kInt8}, 4096, 1024);
  const std::string metadata(SnapshotHeader::kMaxMetadataBytes, 'm');
  const Restored restored = Restore(session.Snapshot(metadata), kMaxPieceBytes);
  ASSERT_TRUE(restored.status.ok()) << restored.status;
  EXPECT_EQ(restored.header.metadata, metadata);
  EXPECT_EQ(restored.header.layout.num_layers(), 1024);
}

// A session of the shapes that the numbers allow may be larger than this server: the cache says so and stays as it was.
TEST(HostileSnapshot, WhatTheCacheCannotHoldIsNotAllocated) {
  TestSession session({4, 4, KvDType::kF32}, 4096, 1024);
  const std::vector<int64_t> lengths(1024, int64_t{1} << 30), first_tokens(1024, 0);
  EXPECT_FALSE(session.cache.AllocateLayers(lengths, first_tokens));
  EXPECT_EQ(session.pool->gauges().used_bytes, 0);
}

template <class T>
void ExpectValueRefused(const TestSession& session, const std::vector<size_t>& offsets, const std::vector<T>& values) {
  const std::string bytes = session.Snapshot();
  for (const size_t offset : offsets) {
    for (const T value : values) {
      SCOPED_TRACE(testing::Message() << "byte " << offset << " of the block: " << +value);
      const std::string hostile = Patched(bytes, FirstBlock(session) + offset, value);
      ExpectRefused(WithRightChecksums(hostile, session.layout.block_bytes), "that no session can have stored", false);
    }
  }
}

TEST(HostileSnapshot, ValuesThatAreNotFiniteAreRefused) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  auto f32 = MakeSession({{8, 70, KvDType::kF32}, 1, {65}, {}}, 1);
  const size_t f32_bytes = f32->layout.block_bytes;
  ExpectValueRefused<float>(*f32, {0, 4, f32->layout.k_bytes - 4, f32->layout.k_bytes, f32_bytes - 4, f32_bytes},
                            {kInfinity, -kInfinity, std::nanf("")});
  auto bf16 = MakeSession({{7, 70, KvDType::kBf16}, 1, {65}, {}}, 1);
  ExpectValueRefused<uint16_t>(*bf16, {0, bf16->layout.k_bytes, bf16->layout.block_bytes - 2},
                               {0x7f80, 0xff80, 0x7fff});
  auto f16 = MakeSession({{7, 70, KvDType::kF16}, 1, {65}, {}}, 1);
  ExpectValueRefused<uint16_t>(*f16, {0, f16->layout.k_bytes, f16->layout.block_bytes - 2}, {0x7c00, 0xfc00, 0x7e01});
}

TEST(HostileSnapshot, QuantisedValuesThatAreOutOfRangeAreRefused) {
  auto session = MakeSession({{7, 70, KvDType::kInt8}, 1, {65}, {}}, 1);
  const BlockLayout& layout = session->layout;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  ExpectValueRefused<float>(
      *session,
      {layout.KScalesOffset(), layout.KScalesOffset() + 252, layout.VScalesOffset(), layout.VScalesOffset() + 252},
      {kInfinity, -kInfinity, std::nanf(""), -1.0f, FLT_MAX, FLT_MAX / 126.0f});
  ExpectValueRefused<int8_t>(*session, {0, layout.KScalesOffset() - 1, layout.PanelOffset(0), layout.block_bytes - 1},
                             {-128});
}

TEST(HostileSnapshot, ExtremeValuesThatASessionCanHaveAreRead) {
  auto session = MakeSession({{7, 70, KvDType::kInt8}, 1, {64}, {}}, 1);
  const BlockLayout& layout = session->layout;
  const size_t block = FirstBlock(*session);
  std::string bytes = Patched(session->Snapshot(), block + layout.KScalesOffset(), FLT_MAX / 127.0f);
  bytes = Patched(bytes, block, int8_t{-127});
  EXPECT_TRUE(Restore(WithRightChecksums(bytes, layout.block_bytes), 100).status.ok());
}

// Slots of tokens that the session does not have would come to life with its next step.
TEST(HostileSnapshot, ValuesInUnusedSlotsAreRefused) {
  for (const KvDType dtype : {KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8}) {
    auto session = MakeSession({{8, 70, dtype}, 1, {63}, {}}, 1);
    const std::string bytes = session->Snapshot();
    const BlockLayout& layout = session->layout;
    const size_t k_row = kBlockTokens * KvUnitBytes(dtype);
    for (const size_t offset : {k_row - 1, layout.KScalesOffset() - 1, layout.block_bytes - 1}) {
      const std::string hostile = Patched(bytes, FirstBlock(*session) + offset, int8_t{1});
      ExpectRefused(WithRightChecksums(hostile, layout.block_bytes), "are followed by others in their block", false);
    }
  }
}

TEST(HostileSnapshot, FramesOfOtherSizesAreRefused) {
  auto session = MakeSession({{4, 4, KvDType::kF32}, 1, {128}, {}}, 1);
  const std::string bytes = session->Snapshot();
  const size_t start = FirstBlock(*session) - 8, block_bytes = session->layout.block_bytes;
  const auto refused = [&](const std::string& hostile) {
    ExpectRefused(WithRightChecksums(hostile, block_bytes), "it begins as another one", false);
  };
  refused(Patched(bytes, start, uint32_t{2}));
  refused(Patched(bytes, start, uint32_t{0}));
  refused(Patched(bytes, bytes.size() - 16, uint32_t{1}));
  // Two frames of a block each, where one of two blocks belongs.
  std::string one = Patched(bytes.substr(start, 8 + block_bytes), 4, uint32_t{1}) + std::string(8, '\0');
  refused(bytes.substr(0, start) + one + one + bytes.substr(bytes.size() - 16));
  // A block less, a block more, and no end.
  refused(bytes.substr(0, start) + one + bytes.substr(bytes.size() - 16));
  refused(bytes.substr(0, bytes.size() - 16) + one + bytes.substr(bytes.size() - 16));
  refused(bytes.substr(0, start) + bytes.substr(bytes.size() - 16));
}

TEST(SnapshotReader, WantsAPlaceForTheBlocks) {
  auto session = MakeSession({{4, 4, KvDType::kF32}, 1, {128}, {}}, 1);
  const std::string bytes = session->Snapshot();
  SnapshotReader reader;
  ASSERT_TRUE(reader.Write(bytes.substr(0, 100)).ok());
  ASSERT_NE(reader.header(), nullptr);
  EXPECT_EQ(reader.total_bytes(), static_cast<int64_t>(bytes.size()));
  EXPECT_EQ(reader.Write(bytes.substr(100)).code(), absl::StatusCode::kFailedPrecondition);
  TestSession target(session->layout.shape, 1, 1);
  ASSERT_TRUE(target.cache.AllocateLayers(reader.header()->layout.lengths, reader.header()->layout.first_tokens));
  ASSERT_TRUE(reader.SetTarget(&target.cache, &target.layout).ok());
  ASSERT_TRUE(reader.Write(bytes.substr(100)).ok());
  ASSERT_TRUE(reader.Finish().ok());
  ExpectEqualSessions(session.get(), &target);
}

TEST(SnapshotReader, RefusesATargetThatIsNotWhatTheHeaderWants) {
  const std::string bytes = MakeSession({{4, 4, KvDType::kF32}, 1, {128}, {}}, 1)->Snapshot();
  struct Target {
    KvShape shape;
    std::vector<int64_t> lengths;
  };
  for (const Target& t : {Target{{4, 8, KvDType::kF32}, {128}}, Target{{8, 8, KvDType::kBf16}, {128}},
                          Target{{4, 4, KvDType::kF32}, {64}}, Target{{4, 4, KvDType::kF32}, {128, 128}}}) {
    SnapshotReader reader;
    ASSERT_TRUE(reader.Write(bytes).ok());
    TestSession target(t.shape, 1, static_cast<int>(t.lengths.size()));
    ASSERT_TRUE(target.cache.AllocateLayers(t.lengths, std::vector<int64_t>(t.lengths.size())));
    EXPECT_EQ(reader.SetTarget(&target.cache, &target.layout).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_FALSE(reader.complete());
    EXPECT_FALSE(reader.Finish().ok());
  }
}

}  // namespace
}  // namespace attnd

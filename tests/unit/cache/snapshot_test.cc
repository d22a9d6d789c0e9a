#include "server/cache/snapshot.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tests/unit/cache/snapshot_harness.h"

namespace attnd {
namespace {

constexpr KvShape kSmall = {2, 1, KvDType::kF32};
constexpr KvDType kDTypes[] = {KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8};

class SnapshotOfType : public testing::TestWithParam<KvDType> {};
INSTANTIATE_TEST_SUITE_P(Snapshot, SnapshotOfType, testing::ValuesIn(kDTypes));

TEST_P(SnapshotOfType, RestoresSessionsOfEveryLength) {
  for (const int64_t length : {0, 1, 2, 3, 62, 63, 64, 65, 127, 128, 129, 1000}) {
    SCOPED_TRACE(length);
    auto session = MakeSession({{20, 70, GetParam()}, 2, {length}, {}}, length);
    const Restored restored = Restore(session->Snapshot("what the engine knows"), 1000);
    ASSERT_TRUE(restored.status.ok()) << restored.status;
    EXPECT_EQ(restored.header.metadata, "what the engine knows");
    ExpectEqualSessions(session.get(), restored.session.get());
  }
}

TEST_P(SnapshotOfType, RestoresLayersOfUnequalLengthsAndWindows) {
  const TestSpec specs[] = {
      {{1, 1, GetParam()}, 1, {0, 0, 0}, {}},
      {{7, 5, GetParam()}, 3, {0, 100, 0, 64, 1, 0}, {}},
      {{64, 64, GetParam()}, 2, {1000, 1000, 1000}, {0, 896, 960}},
      {{33, 130, GetParam()}, 1, {128, 200, 65, 3}, {128, 192, 64, 0}},  // the first layer has no token left
      {{256, 256, GetParam()}, 4, {700, 10}, {64, 0}},
  };
  for (const TestSpec& spec : specs) {
    SCOPED_TRACE(testing::PrintToString(spec.lengths));
    auto session = MakeSession(spec, 1);
    const Restored restored = Restore(session->Snapshot(), kMaxPieceBytes);
    ASSERT_TRUE(restored.status.ok()) << restored.status;
    ExpectEqualSessions(session.get(), restored.session.get());
    EXPECT_EQ(restored.session->Snapshot(), session->Snapshot());
  }
}

// What was written once must be readable for ever, and a checksum be the same by every instruction set.
TEST(Snapshot, FormatStays) {
  TestSession session({3, 2, KvDType::kBf16}, 1, 2);
  ASSERT_TRUE(session.cache.AllocateLayers(std::vector<int64_t>{130, 2}, std::vector<int64_t>{64, 0}));
  const auto fill = [&](int layer, int64_t block, int first) {
    std::byte* const to = session.Block(layer, block, 0);
    for (size_t i = 0; i < session.layout.block_bytes; i++) to[i] = static_cast<std::byte>((first + i) % 64);
  };
  fill(0, 1, 1);
  fill(0, 2, 2);
  fill(1, 0, 3);
  const std::string bytes = session.Snapshot("abc");
  const std::string start(
      "\211ATTND\r\n\x01\0\0\0\x43\0\0\0"                                                 // magic, version, body bytes
      "\x01\0\0\0\x03\0\0\0\x02\0\0\0\x01\0\0\0\x02\0\0\0\x40\0\0\0\0\x03\0\0\x03\0\0\0"  // numbers
      "\x82\0\0\0\0\0\0\0\x40\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"            // layers
      "abc",
      16 + 32 + 32 + 3);
  EXPECT_EQ(bytes.substr(0, start.size()), start);
  EXPECT_EQ(bytes.size(), start.size() + 8 + 8 + 3 * 768 + 8 + 16);
  EXPECT_EQ(XXH64(bytes.data(), bytes.size(), 0), uint64_t{0x54b4a85d0fad10e4});
  EXPECT_TRUE(WithRightChecksums(bytes, session.layout.block_bytes) == bytes);
  const Restored restored = Restore(bytes, 1000);
  ASSERT_TRUE(restored.status.ok()) << restored.status;
  ExpectEqualSessions(&session, restored.session.get());
}

TEST(Snapshot, S17OfAnEmptySessionIsAnEmptySession) {
  auto session = MakeSession({kSmall, 1, {0}, {}}, 1);
  const std::string bytes = session->Snapshot();
  EXPECT_EQ(bytes.size(), 16u + 32u + 16u + 8u + 16u);
  const Restored restored = Restore(bytes, 7);
  ASSERT_TRUE(restored.status.ok()) << restored.status;
  EXPECT_EQ(restored.session->cache.length(0), 0);
  EXPECT_EQ(restored.session->cache.used_bytes(), 0);
}

TEST(Snapshot, MayBeCutAnywhere) {
  auto session = MakeSession({{3, 2, KvDType::kF16}, 2, {65, 0, 3}, {}}, 1);
  const std::string bytes = session->Snapshot("metadata");
  for (size_t piece = 1; piece <= bytes.size() + 1; piece++) {
    const Restored restored = Restore(bytes, piece);
    ASSERT_TRUE(restored.status.ok()) << restored.status << " pieces of " << piece;
    ASSERT_EQ(restored.header.metadata, "metadata");
    ExpectEqualSessions(session.get(), restored.session.get());
  }
}

// Several frames, and blocks that frames of the greatest size do not divide.
TEST(Snapshot, MayBeCutAnywhereInLargeFrames) {
  auto session = MakeSession({{256, 200, KvDType::kF32}, 3, {500}, {}}, 1);
  const std::string bytes = session->Snapshot();
  EXPECT_GT(bytes.size(), 2 * kMaxPieceBytes);
  for (const size_t piece : {size_t{1009}, size_t{65536}, kMaxPieceBytes - 1, kMaxPieceBytes + 1, bytes.size()}) {
    const Restored restored = Restore(bytes, piece);
    ASSERT_TRUE(restored.status.ok()) << restored.status << " pieces of " << piece;
    ExpectEqualSessions(session.get(), restored.session.get());
  }
}

// Blocks are handed out full of NaN, are written in other steps, hold tokens that were cut off again, or are copies.
TEST_P(SnapshotOfType, EqualSessionsGiveEqualBytesWhateverTheirMemoryHeld) {
  const KvShape shape = {19, 67, GetParam()};
  auto plain = MakeSession({shape, 2, {100, 65}, {}}, 1);
  const std::string bytes = plain->Snapshot();

  TestSession longer(shape, 2, 2);
  std::mt19937_64 other(99);
  for (const int layer : {0, 1}) longer.Append(layer, 500, &other);
  for (const int layer : {0, 1}) longer.cache.Truncate(layer, 0);
  std::mt19937_64 random(1);
  for (const auto& [layer, tokens] : {std::pair(0, 33), {0, 67}, {1, 21}, {1, 44}})
    longer.Append(layer, tokens, &random);
  for (const int layer : {0, 1}) longer.Append(layer, 70, &other);
  longer.cache.Truncate(0, 100);
  longer.cache.Truncate(1, 65);
  EXPECT_TRUE(longer.Snapshot() == bytes);

  const Restored restored = Restore(bytes, 100);
  ASSERT_TRUE(restored.status.ok());
  EXPECT_TRUE(restored.session->Snapshot() == bytes);
}

TEST(Snapshot, HoldsOneMomentOfASessionThatGoesOn) {
  auto session = MakeSession({{16, 16, KvDType::kBf16}, 2, {100, 20}, {}}, 1);
  const std::string bytes = session->Snapshot();
  SessionCache pinned(session->pool.get(), session->layout.block_bytes, 2, 2);
  pinned.ShareFrom(session->cache, 100);
  SnapshotWriter writer(pinned, session->layout, {LayoutOf(pinned, session->layout.shape, 2), ""});
  std::mt19937_64 random(5);
  std::string all;
  ASSERT_TRUE(writer.Next(&all));
  for (const int layer : {0, 1}) {
    session->cache.Truncate(layer, 10);
    session->Append(layer, 300, &random);
  }
  for (std::string piece; writer.Next(&piece);) all += piece;
  EXPECT_TRUE(all == bytes);
  EXPECT_TRUE(pinned.Release(1000));
}

// What a refusal must be: an error with a sentence, no header unless its bytes were right, and nothing complete.
void ExpectRefused(absl::string_view bytes, const std::string& sentence = "") {
  for (const size_t piece : {bytes.size() + 1, size_t{13}}) {
    const Restored restored = Restore(bytes, piece);
    ASSERT_EQ(restored.status.code(), absl::StatusCode::kInvalidArgument) << restored.status;
    ASSERT_THAT(std::string(restored.status.message()), testing::HasSubstr(sentence));
    ASSERT_THAT(std::string(restored.status.message()), testing::HasSubstr("snapshot"));
  }
}

TEST_P(SnapshotOfType, S17EveryFlippedByteIsRefused) {
  auto session = MakeSession({{2, 1, GetParam()}, 1, {64, 3}, {}}, 1);
  const std::string bytes = session->Snapshot("metadata");
  for (size_t at = 0; at < bytes.size(); at++) {
    for (const unsigned flip : {0x01u, 0x80u, 0xffu}) {
      SCOPED_TRACE(testing::Message() << "byte " << at << " of " << bytes.size() << " ^ " << flip);
      std::string damaged = bytes;
      damaged[at] = static_cast<char>(damaged[at] ^ flip);
      ASSERT_NO_FATAL_FAILURE(ExpectRefused(damaged));
    }
  }
}

TEST(Snapshot, S17EveryTruncationIsRefused) {
  auto session = MakeSession({kSmall, 1, {64, 3}, {}}, 1);
  const std::string bytes = session->Snapshot("metadata");
  for (size_t size = 0; size < bytes.size(); size++) {
    SCOPED_TRACE(size);
    ASSERT_NO_FATAL_FAILURE(ExpectRefused(bytes.substr(0, size), absl::StrCat("ends after ", size)));
  }
}

TEST(Snapshot, WhatFollowsTheEndIsRefused) {
  const std::string bytes = MakeSession({kSmall, 1, {3}, {}}, 1)->Snapshot();
  ExpectRefused(bytes + "x", "goes on after its end");
  ExpectRefused(bytes + bytes, "goes on after its end");
  ExpectRefused(bytes + bytes.substr(bytes.size() - 16), "goes on after its end");  // a second end
}

// The frames of a snapshot one by one: the header, frames of blocks, the end.
std::vector<std::string> Split(const TestSession& session) {
  SnapshotWriter writer(session.cache, session.layout, {session.Layout(), ""});
  std::vector<std::string> pieces;
  for (std::string piece; writer.Next(&piece);) pieces.push_back(piece);
  return pieces;
}

TEST(Snapshot, FramesThatAreSwappedRepeatedOrDroppedAreRefused) {
  auto session = MakeSession({{256, 256, KvDType::kF32}, 1, {4 * 7 * 64}, {}}, 1);
  const std::vector<std::string> frames = Split(*session);
  ASSERT_EQ(frames.size(), 6u);
  const auto join = [&](const std::vector<int>& order) {
    std::string all;
    for (const int i : order) all += frames[i];
    return all;
  };
  ASSERT_TRUE(Restore(join({0, 1, 2, 3, 4, 5}), kMaxPieceBytes).status.ok());
  for (const std::vector<int>& order : {std::vector{0, 2, 1, 3, 4, 5},
                                        {0, 1, 3, 2, 4, 5},
                                        {0, 1, 2, 4, 3, 5},
                                        {0, 1, 1, 3, 4, 5},
                                        {0, 1, 1, 2, 3, 4, 5},
                                        {0, 2, 3, 4, 5},
                                        {0, 1, 2, 3, 5},
                                        {0, 5},
                                        {0, 1, 2, 3, 5, 4},
                                        {0, 0, 1, 2, 3, 4, 5}}) {
    SCOPED_TRACE(testing::PrintToString(order));
    const Restored restored = Restore(join(order), kMaxPieceBytes);
    EXPECT_EQ(restored.status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(restored.status.message()), testing::HasSubstr("frame"));
  }
  // Of another session of the same layout, and of the same one with other metadata.
  const std::vector<std::string> others = Split(*MakeSession({{256, 256, KvDType::kF32}, 1, {4 * 7 * 64}, {}}, 2));
  EXPECT_FALSE(Restore(frames[0] + frames[1] + others[2] + frames[3] + frames[4] + frames[5], 4096).status.ok());
  EXPECT_FALSE(
      Restore(session->Snapshot("x").substr(0, frames[0].size() + 1) + join({1, 2, 3, 4, 5}), 4096).status.ok());
}

}  // namespace
}  // namespace attnd

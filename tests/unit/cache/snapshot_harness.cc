#include "tests/unit/cache/snapshot_harness.h"

#include <gtest/gtest.h>
#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "kernels/append.h"

namespace attnd {
namespace {

std::unique_ptr<BlockPool> MakePool(int64_t capacity_bytes) {
  auto pool = BlockPool::Create({capacity_bytes, true});
  EXPECT_TRUE(pool.ok()) << pool.status();
  return *std::move(pool);
}

// The tokens of a block alone, all else zero.
std::vector<std::byte> Tokens(const BlockLayout& layout, const std::byte* block, int tokens) {
  std::vector<std::byte> copy(layout.block_bytes);
  CopyTokens(layout, block, tokens, copy.data());
  return copy;
}

}  // namespace

TestSession::TestSession(const KvShape& shape, int heads, int num_layers, int64_t capacity_bytes)
    : layout(shape),
      num_kv_heads(heads),
      pool(MakePool(capacity_bytes)),
      cache(pool.get(), layout.block_bytes, num_layers, heads) {}

TestSession::~TestSession() { EXPECT_TRUE(cache.Release(int64_t{1} << 40)); }

void TestSession::Append(int layer, int64_t tokens, std::mt19937_64* random) {
  StagedAppend staged;
  ASSERT_TRUE(cache.Stage(layer, cache.length(layer), tokens, &staged));
  for (const BlockId id : staged.fresh) InitBlock(layout, cache.Address(id));
  std::normal_distribution<float> normal;
  std::vector<float> k(tokens * num_kv_heads * layout.shape.head_dim);
  std::vector<float> v(tokens * num_kv_heads * layout.shape.value_dim);
  for (float& x : k) x = normal(*random);
  for (float& x : v) x = normal(*random);
  const auto rows = [&](const std::vector<float>& tensor, int64_t token, int head, int dim) {
    return RowsView{reinterpret_cast<const std::byte*>(tensor.data() + (token * num_kv_heads + head) * dim),
                    num_kv_heads * dim * sizeof(float), DType::kF32};
  };
  for (int head = 0; head < num_kv_heads; head++) {
    for (int64_t at = staged.start; at < staged.length();) {
      const int slot = static_cast<int>(at % kBlockTokens);
      const int count = static_cast<int>(std::min<int64_t>(kBlockTokens - slot, staged.length() - at));
      WriteTokens(layout, cache.Address(cache.block(staged, at / kBlockTokens, head)), slot, count,
                  rows(k, at - staged.start, head, layout.shape.head_dim),
                  rows(v, at - staged.start, head, layout.shape.value_dim));
      at += count;
    }
  }
  cache.Commit(&staged);
}

std::string TestSession::Snapshot(const std::string& metadata) const {
  SnapshotWriter writer(cache, layout, {Layout(), metadata});
  std::string all;
  for (std::string piece; writer.Next(&piece);) {
    EXPECT_LE(piece.size(), kMaxPieceBytes);
    all += piece;
  }
  std::string rest = "rest";
  EXPECT_FALSE(writer.Next(&rest));
  EXPECT_EQ(rest, "");
  EXPECT_EQ(static_cast<int64_t>(all.size()), writer.total_bytes());
  return all;
}

std::unique_ptr<TestSession> MakeSession(const TestSpec& spec, uint64_t seed) {
  std::mt19937_64 random(seed);
  auto session = std::make_unique<TestSession>(spec.shape, spec.num_kv_heads, static_cast<int>(spec.lengths.size()));
  for (size_t i = 0; i < spec.lengths.size(); i++) {
    const int layer = static_cast<int>(i);
    // In two appends, the first of which is no whole number of blocks.
    const int64_t first = spec.lengths[i] / 3;
    if (first > 0) session->Append(layer, first, &random);
    if (spec.lengths[i] > first) session->Append(layer, spec.lengths[i] - first, &random);
    if (!spec.first_tokens.empty()) session->cache.FreeBefore(layer, spec.first_tokens[i]);
  }
  return session;
}

Restored Restore(absl::string_view bytes, size_t piece_bytes) {
  Restored restored;
  SnapshotReader reader;
  for (size_t at = 0; at < bytes.size() && restored.status.ok(); at += piece_bytes) {
    restored.status = reader.Write(bytes.substr(at, piece_bytes));
    if (reader.header() == nullptr || restored.session != nullptr) continue;
    restored.header = *reader.header();
    const SnapshotLayout& layout = restored.header.layout;
    restored.session = std::make_unique<TestSession>(layout.shape, layout.num_kv_heads, layout.num_layers());
    SessionCache* const cache = &restored.session->cache;
    EXPECT_TRUE(cache->AllocateLayers(layout.lengths, layout.first_tokens));
    if (restored.status.ok()) restored.status = reader.SetTarget(cache, &restored.session->layout);
  }
  EXPECT_EQ(reader.complete(), reader.Finish().ok());
  if (restored.status.ok()) {
    restored.status = reader.Finish();
  } else {
    EXPECT_EQ(reader.Finish(), restored.status);
    EXPECT_EQ(reader.Write("more"), restored.status);
  }
  return restored;
}

void ExpectEqualSessions(TestSession* original, TestSession* restored) {
  const SnapshotLayout layout = original->Layout();
  ASSERT_EQ(restored->layout.shape, layout.shape);
  ASSERT_EQ(restored->num_kv_heads, layout.num_kv_heads);
  ASSERT_EQ(restored->Layout().lengths, layout.lengths);
  ASSERT_EQ(restored->Layout().first_tokens, layout.first_tokens);
  for (int l = 0; l < layout.num_layers(); l++) {
    for (int64_t i = layout.first_tokens[l] / kBlockTokens; i * kBlockTokens < layout.lengths[l]; i++) {
      const int tokens = static_cast<int>(std::min<int64_t>(kBlockTokens, layout.lengths[l] - i * kBlockTokens));
      for (int h = 0; h < layout.num_kv_heads; h++) {
        const std::byte* const block = restored->Block(l, i, h);
        const std::vector<std::byte> want = Tokens(original->layout, original->Block(l, i, h), tokens);
        ASSERT_EQ(std::memcmp(block, want.data(), want.size()), 0) << "layer " << l << " block " << i << " head " << h;
      }
    }
  }
}

std::string WithRightChecksums(std::string snapshot, size_t block_bytes) {
  const auto u32 = [&](size_t at) {
    uint32_t number;
    std::memcpy(&number, snapshot.data() + at, sizeof(number));
    return number;
  };
  size_t start = 0, end = 16 + u32(12);
  uint64_t checksum = 0;
  for (;;) {
    checksum = XXH3_64bits_withSeed(snapshot.data() + start, end - start, checksum);
    std::memcpy(snapshot.data() + end, &checksum, sizeof(checksum));
    start = end + sizeof(checksum);
    if (start == snapshot.size()) return snapshot;
    end = start + 8 + u32(start + 4) * block_bytes;
  }
}

}  // namespace attnd

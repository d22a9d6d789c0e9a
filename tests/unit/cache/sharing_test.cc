// Caches that share blocks, give up what a window has passed, or take whole sessions' memory at once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "tests/unit/cache/cache_harness.h"

namespace attnd {
namespace {

constexpr int kHeads = 2;
constexpr int64_t kBytes = kBlockBytes;

std::unique_ptr<SessionCache> MakeCache(BlockPool* pool, int layers = 1) {
  return std::make_unique<SessionCache>(pool, kBlockBytes, layers, kHeads);
}

// Every held token of the layer is stamp + position, in every head.
void ExpectTokens(const SessionCache& cache, int layer, int64_t length, int64_t stamp) {
  ASSERT_EQ(cache.length(layer), length);
  for (int64_t p = cache.first_token(layer); p < length; p++) {
    for (int h = 0; h < kHeads; h++) ASSERT_EQ(Read(cache, layer, p, h), stamp + p + h * 1000003) << p;
  }
}

TEST(Sharing, AForkHoldsTheSameBlocksUntilSomeoneWrites) {
  auto pool = MakePool(100);
  auto parent = MakeCache(pool.get()), child = MakeCache(pool.get());
  Append(parent.get(), 0, 0, 200, kHeads, 5000);
  child->ShareFrom(*parent, 130);
  EXPECT_EQ(pool->gauges().used_bytes, 4 * kHeads * kBytes);
  EXPECT_EQ(pool->gauges().shared_bytes, 3 * kHeads * kBytes);
  EXPECT_EQ(pool->gauges().tokens, 330);
  EXPECT_EQ(child->used_bytes(), 3 * kHeads * kBytes);
  ExpectTokens(*child, 0, 130, 5000);
  EXPECT_EQ(child->BlocksToStage(0, 130, 1), kHeads) << "a copy of the third";
  EXPECT_EQ(parent->BlocksToStage(0, 200, 1), 0) << "the fourth is the parent's alone";
  Append(child.get(), 0, 130, 100, kHeads, 5000);
  ExpectTokens(*child, 0, 230, 5000);
  ExpectTokens(*parent, 0, 200, 5000);
  EXPECT_EQ(pool->gauges().shared_bytes, 2 * kHeads * kBytes);
  EXPECT_EQ(pool->gauges().used_bytes, 6 * kHeads * kBytes);
  EXPECT_TRUE(parent->Release(1000));
  EXPECT_EQ(pool->gauges().shared_bytes, 0);
  EXPECT_EQ(pool->gauges().used_bytes, 4 * kHeads * kBytes);
  ExpectTokens(*child, 0, 230, 5000);
  EXPECT_TRUE(child->Release(1000));
  EXPECT_EQ(pool->gauges().used_bytes, 0);
  EXPECT_EQ(pool->gauges().tokens, 0);
}

TEST(Sharing, AnAbortedCopyLeavesBothAsTheyWere) {
  auto pool = MakePool(100);
  auto parent = MakeCache(pool.get()), child = MakeCache(pool.get());
  Append(parent.get(), 0, 0, 100, kHeads, 5000);
  child->ShareFrom(*parent, 100);
  for (SessionCache* cache : {parent.get(), child.get()}) {
    StagedAppend staged;
    ASSERT_TRUE(cache->Stage(0, 100, 10, &staged));
    EXPECT_EQ(staged.copied_tokens, 36);
    Write(*cache, staged, kHeads, 9000);
    cache->Abort(&staged);
    ExpectTokens(*parent, 0, 100, 5000);
    ExpectTokens(*child, 0, 100, 5000);
    EXPECT_EQ(pool->gauges().used_bytes, 2 * kHeads * kBytes);
    EXPECT_EQ(pool->gauges().shared_bytes, 2 * kHeads * kBytes);
  }
  for (auto* cache : {&parent, &child}) EXPECT_TRUE((*cache)->Release(1000));
}

TEST(Sharing, ShortLayersAreSharedWhole) {
  auto pool = MakePool(100);
  auto parent = MakeCache(pool.get(), 3), child = MakeCache(pool.get(), 3);
  Append(parent.get(), 0, 0, 150, kHeads, 0);
  Append(parent.get(), 2, 0, 7, kHeads, 0);
  child->ShareFrom(*parent, 64);
  EXPECT_EQ(child->length(0), 64);
  EXPECT_EQ(child->length(1), 0);
  EXPECT_EQ(child->length(2), 7);
  EXPECT_EQ(child->longest(), 64);
  for (auto* cache : {&parent, &child}) EXPECT_TRUE((*cache)->Release(1000));
  EXPECT_EQ(pool->gauges().tokens, 0);
}

TEST(Sharing, ReorderKeepsWhatARowHasAlready) {
  auto pool = MakePool(100);
  std::vector<std::unique_ptr<SessionCache>> owned;
  std::vector<SessionCache*> rows;
  for (int i = 0; i < 4; i++) owned.push_back(MakeCache(pool.get())), rows.push_back(owned.back().get());
  Append(rows[0], 0, 0, 128, kHeads, 5000);
  for (int i = 1; i < 4; i++) rows[i]->ShareFrom(*rows[0], 128);
  for (int i = 0; i < 4; i++) Append(rows[i], 0, 128, 10, kHeads, 1000 * i);
  EXPECT_EQ(pool->gauges().used_bytes, (2 + 4) * kHeads * kBytes);
  SessionCache::Reorder(rows, {2, 2, 1, 3});
  EXPECT_EQ(pool->gauges().used_bytes, (2 + 3) * kHeads * kBytes);
  EXPECT_EQ(pool->gauges().shared_bytes, (2 + 1) * kHeads * kBytes);
  for (int i = 0; i < 4; i++) {
    EXPECT_EQ(Read(*rows[i], 0, 5, 0), 5005);
    EXPECT_EQ(Read(*rows[i], 0, 130, 0), std::vector<int64_t>({2130, 2130, 1130, 3130})[i]);
    EXPECT_EQ(rows[i]->used_bytes(), 3 * kHeads * kBytes);
  }
  for (SessionCache* row : rows) EXPECT_TRUE(row->Release(1000));
  EXPECT_EQ(pool->gauges().used_bytes, 0);
}

TEST(Sharing, FreeBeforeFreesWholeBlocksOnce) {
  auto pool = MakePool(100);
  auto cache = MakeCache(pool.get());
  Append(cache.get(), 0, 0, 300, kHeads, 5000);
  const int64_t all = 5 * kHeads * kBytes;
  for (const auto& [position, first] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 0}, {63, 0}, {64, 64}, {100, 64}, {10, 64}, {128, 128}, {255, 192}}) {
    cache->FreeBefore(0, position);
    EXPECT_EQ(cache->first_token(0), first) << position;
    EXPECT_EQ(pool->gauges().used_bytes, all - first / kBlockTokens * kHeads * kBytes);
    EXPECT_EQ(cache->BlocksWith(0, 300, 30), 6 * kHeads - first / kBlockTokens * kHeads);
    EXPECT_EQ(cache->BlocksWith(0, 0, 10), kHeads);
    ExpectTokens(*cache, 0, 300, 5000);
  }
  EXPECT_EQ(cache->block(0, 2, 0), kNoBlock);
  EXPECT_NE(cache->block(0, 3, 0), kNoBlock);
  // The freed ones are left out of a fork, and not freed again.
  auto child = MakeCache(pool.get());
  child->ShareFrom(*cache, 280);
  EXPECT_EQ(child->first_token(0), 192);
  ExpectTokens(*child, 0, 280, 5000);
  cache->Truncate(0, 192);
  EXPECT_EQ(cache->used_bytes(), 0);
  EXPECT_EQ(cache->first_token(0), 192);
  Append(cache.get(), 0, 192, 5, kHeads, 7000);
  EXPECT_EQ(Read(*cache, 0, 196, 1), 7196 + 1000003);
  ExpectTokens(*child, 0, 280, 5000);
  // From 0 on everything is held again.
  Append(cache.get(), 0, 0, 70, kHeads, 8000);
  EXPECT_EQ(cache->first_token(0), 0);
  ExpectTokens(*cache, 0, 70, 8000);
  child->Truncate(0, 0);
  EXPECT_EQ(child->first_token(0), 0);
  Append(child.get(), 0, 0, 70, kHeads, 9000);
  ExpectTokens(*child, 0, 70, 9000);
  for (auto* c : {&cache, &child}) EXPECT_TRUE((*c)->Release(3) || (*c)->Release(1000));
  EXPECT_EQ(pool->gauges().used_bytes, 0);
}

TEST(Sharing, AllocateLayersIsAllOrNothing) {
  auto pool = MakePool(11);
  auto cache = MakeCache(pool.get(), 3);
  EXPECT_FALSE(cache->AllocateLayers({130, 300, 1}, {0, 192, 0}));  // 3 + 2 + 1 blocks of two heads
  EXPECT_EQ(pool->gauges().used_bytes, 0);
  EXPECT_EQ(cache->longest(), 0);
  ASSERT_TRUE(cache->AllocateLayers({130, 300, 0}, {0, 192, 0}));
  EXPECT_EQ(cache->used_bytes(), 10 * kBytes);
  EXPECT_EQ(cache->longest(), 300);
  EXPECT_EQ(pool->gauges().tokens, 300);
  EXPECT_EQ(cache->first_token(1), 192);
  std::set<BlockId> ids;
  for (int layer = 0; layer < 2; layer++) {
    for (int64_t i = cache->first_token(layer) / kBlockTokens; i * kBlockTokens < cache->length(layer); i++) {
      for (int h = 0; h < kHeads; h++) ids.insert(cache->block(layer, i, h));
    }
  }
  EXPECT_EQ(ids.size(), 10u);
  EXPECT_EQ(ids.count(kNoBlock), 0u);
  Append(cache.get(), 0, 130, 5, kHeads, 0);  // goes on in the last block
  EXPECT_EQ(cache->used_bytes(), 10 * kBytes);
  EXPECT_TRUE(cache->Release(1000));
  EXPECT_EQ(pool->gauges().used_bytes, 0);
  EXPECT_EQ(pool->gauges().tokens, 0);
}

// Some sessions' lives at random, against plain vectors of numbers.
class RandomSessions {
 public:
  RandomSessions(uint64_t seed, int64_t blocks) : random_(seed), pool_(MakePool(blocks)), blocks_(blocks) {}

  void Run(int operations) {
    for (int i = 0; i < operations; i++) {
      stamp_ = static_cast<int64_t>(i + 1) << 32;
      switch (Below(8)) {
        case 0:
          Open();
          break;
        case 1:
          Fork();
          break;
        case 2:
          Reorder();
          break;
        case 3:
          FreeBefore();
          break;
        case 4:
          Truncate();
          break;
        case 5:
          if (Below(3) == 0) Close();
          break;
        default:
          Append();
      }
      ASSERT_NO_FATAL_FAILURE(Check()) << "operation " << i;
    }
    while (!sessions_.empty()) Close();
    const PoolGauges gauges = pool_->gauges();
    EXPECT_EQ(gauges.used_bytes + gauges.reserved_bytes + gauges.shared_bytes + gauges.tokens, 0);
  }

 private:
  static constexpr int kLayers = 2;
  struct Layer {
    std::vector<int64_t> tokens;
    int64_t first = 0;
  };
  struct Model {
    std::unique_ptr<SessionCache> cache;
    Layer layers[kLayers];
  };

  int64_t Below(int64_t n) { return static_cast<int64_t>(random_() % n); }
  Model* Any() { return sessions_.empty() ? nullptr : sessions_[Below(static_cast<int64_t>(sessions_.size()))].get(); }

  // Somewhere a layer can be cut to or staged from.
  int64_t Position(const Layer& layer) {
    const auto length = static_cast<int64_t>(layer.tokens.size());
    const int64_t position = layer.first + Below(length - layer.first + 1);
    return Below(10) == 0 ? 0 : position;
  }

  Model* Add() {
    sessions_.push_back(std::make_unique<Model>());
    sessions_.back()->cache = MakeCache(pool_.get(), kLayers);
    return sessions_.back().get();
  }

  void Open() {
    if (sessions_.size() >= 8) return;
    Model* const m = Add();
    if (Below(3) == 0) (void)m->cache->Reserve(Below(200));
    if (Below(3) > 0) return;
    if (m->cache->reserved_bytes() > 0) return;
    int64_t lengths[kLayers], firsts[kLayers];
    for (int l = 0; l < kLayers; l++) lengths[l] = Below(200), firsts[l] = Below(lengths[l] / 64 + 1) * 64;
    if (!m->cache->AllocateLayers(lengths, firsts)) return;
    for (int l = 0; l < kLayers; l++) {
      m->layers[l].first = firsts[l];
      m->layers[l].tokens.resize(lengths[l]);
      for (int64_t p = firsts[l]; p < lengths[l]; p++) {
        m->layers[l].tokens[p] = stamp_ + p;
        for (int h = 0; h < kHeads; h++) {
          Slots(*m->cache, m->cache->block(l, p / kBlockTokens, h))[p % kBlockTokens] = stamp_ + p + h * 1000003;
        }
      }
    }
  }

  void Fork() {
    Model* const parent = Any();
    if (parent == nullptr || sessions_.size() >= 8) return;
    int64_t length = Below(4) == 0 ? parent->cache->longest() : Below(parent->cache->longest() + 1);
    for (const Layer& layer : parent->layers) {
      if (length > 0 && length < static_cast<int64_t>(layer.tokens.size())) length = std::max(length, layer.first);
    }
    Model* const child = Add();
    child->cache->ShareFrom(*parent->cache, length);
    for (int l = 0; l < kLayers; l++) {
      const Layer& from = parent->layers[l];
      const auto tokens = std::min<int64_t>(length, static_cast<int64_t>(from.tokens.size()));
      child->layers[l].tokens.assign(from.tokens.begin(), from.tokens.begin() + tokens);
      child->layers[l].first = tokens == 0 ? 0 : from.first;
    }
  }

  void Reorder() {
    std::vector<Model*> rows;
    for (const auto& m : sessions_) {
      if (Below(2) == 0) rows.push_back(m.get());
    }
    if (rows.empty()) return;
    std::shuffle(rows.begin(), rows.end(), random_);
    std::vector<SessionCache*> caches;
    std::vector<int> sources;
    std::vector<std::vector<Layer>> before;
    for (Model* row : rows) {
      caches.push_back(row->cache.get());
      sources.push_back(static_cast<int>(Below(static_cast<int64_t>(rows.size()))));
      before.emplace_back(std::begin(row->layers), std::end(row->layers));
    }
    SessionCache::Reorder(caches, sources);
    for (size_t i = 0; i < rows.size(); i++) std::copy_n(before[sources[i]].begin(), kLayers, rows[i]->layers);
  }

  void FreeBefore() {
    Model* const m = Any();
    if (m == nullptr) return;
    const int l = static_cast<int>(Below(kLayers));
    const int64_t position = Below(static_cast<int64_t>(m->layers[l].tokens.size()) + 1);
    m->cache->FreeBefore(l, position);
    m->layers[l].first = std::max(m->layers[l].first, position / kBlockTokens * kBlockTokens);
  }

  void Truncate() {
    Model* const m = Any();
    if (m == nullptr) return;
    const int l = static_cast<int>(Below(kLayers));
    const int64_t cut = Position(m->layers[l]);
    m->cache->Truncate(l, cut);
    m->layers[l].tokens.resize(cut);
    if (cut == 0) m->layers[l].first = 0;
  }

  void Append() {
    Model* const m = Any();
    if (m == nullptr) return;
    const int l = static_cast<int>(Below(kLayers));
    Layer& layer = m->layers[l];
    const int64_t start = Below(2) > 0 ? static_cast<int64_t>(layer.tokens.size()) : Position(layer);
    const int64_t tokens = 1 + Below(Below(2) ? 150 : 4);
    StagedAppend staged;
    if (!m->cache->Stage(l, start, tokens, &staged)) return Close();
    Write(*m->cache, staged, kHeads, stamp_);
    if (Below(5) == 0) return m->cache->Abort(&staged);
    m->cache->Commit(&staged);
    layer.tokens.resize(start);
    for (int64_t p = start; p < start + tokens; p++) layer.tokens.push_back(stamp_ + p);
    if (start == 0) layer.first = 0;
  }

  void Close() {
    if (sessions_.empty()) return;
    const int64_t i = Below(static_cast<int64_t>(sessions_.size()));
    while (!sessions_[i]->cache->Release(1 + Below(10))) {
    }
    sessions_.erase(sessions_.begin() + i);
  }

  void Check() {
    std::map<BlockId, int> holders;
    int64_t tokens = 0;
    for (const auto& m : sessions_) {
      int64_t held = 0, longest = 0;
      for (int l = 0; l < kLayers; l++) {
        const Layer& layer = m->layers[l];
        const auto length = static_cast<int64_t>(layer.tokens.size());
        ASSERT_EQ(m->cache->length(l), length);
        ASSERT_EQ(m->cache->first_token(l), layer.first);
        longest = std::max(longest, length);
        for (int64_t p = layer.first; p < length; p++) {
          for (int h = 0; h < kHeads; h++) ASSERT_EQ(Read(*m->cache, l, p, h), layer.tokens[p] + h * 1000003);
        }
        for (int64_t b = 0; b * kBlockTokens < length; b++) {
          for (int h = 0; h < kHeads; h++) {
            const BlockId id = m->cache->block(l, b, h);
            ASSERT_EQ(id == kNoBlock, b * kBlockTokens < layer.first);
            if (id != kNoBlock) holders[id]++, held++;
          }
        }
      }
      ASSERT_EQ(m->cache->used_bytes(), held * kBytes);
      ASSERT_GE(m->cache->reserved_bytes(), held * kBytes);
      ASSERT_EQ(m->cache->longest(), longest);
      tokens += longest;
    }
    const PoolGauges gauges = pool_->gauges();
    int64_t shared = 0, promised = 0;
    for (const auto& [id, count] : holders) shared += count > 1;
    for (const auto& m : sessions_) promised += m->cache->reserved_bytes() - m->cache->used_bytes();
    ASSERT_EQ(gauges.used_bytes, static_cast<int64_t>(holders.size()) * kBytes);
    ASSERT_EQ(gauges.shared_bytes, shared * kBytes);
    ASSERT_EQ(gauges.reserved_bytes, gauges.used_bytes + promised);
    ASSERT_LE(gauges.reserved_bytes, blocks_ * kBytes);
    ASSERT_EQ(gauges.tokens, tokens);
  }

  std::mt19937_64 random_;
  const std::unique_ptr<BlockPool> pool_;
  const int64_t blocks_;
  std::vector<std::unique_ptr<Model>> sessions_;
  int64_t stamp_ = 0;
};

TEST(Sharing, RandomOperationsAgainstAModel) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  for (const int64_t blocks : {20, 60, 1000}) RandomSessions(seed, blocks).Run(4000);
}

}  // namespace
}  // namespace attnd

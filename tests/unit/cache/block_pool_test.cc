#include "server/cache/block_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "absl/types/span.h"

namespace attnd {
namespace {

std::unique_ptr<BlockPool> MakePool(int64_t capacity, bool poison = false) {
  auto pool = BlockPool::Create({capacity, poison});
  EXPECT_TRUE(pool.ok()) << pool.status();
  return *std::move(pool);
}

void Free(BlockPool* pool, BlockAccount* account, BlockId id) { pool->Unref(account, absl::MakeSpan(&id, 1)); }

TEST(BlockPool, RefusesCapacitiesItCannotServe) {
  EXPECT_FALSE(BlockPool::Create({0, false}).ok());
  EXPECT_FALSE(BlockPool::Create({-1, false}).ok());
  EXPECT_FALSE(BlockPool::Create({int64_t{1} << 50, false}).ok());
}

TEST(BlockPool, LimitIsExactInBytes) {
  for (const int64_t capacity : {1, 511, 512, 513, 5119, 5120, 5121, 3 << 20}) {
    auto pool = MakePool(capacity);
    BlockAccount account = pool->OpenAccount(512);
    std::vector<BlockId> ids;
    BlockId id;
    while (pool->Allocate(&account, 1, &id)) ids.push_back(id);
    EXPECT_EQ(static_cast<int64_t>(ids.size()), capacity / 512) << capacity;
    EXPECT_EQ(pool->gauges().used_bytes, static_cast<int64_t>(ids.size()) * 512);
    pool->Unref(&account, ids);
    EXPECT_EQ(pool->gauges().used_bytes, 0);
    EXPECT_EQ(pool->gauges().reserved_bytes, 0);
    pool->CloseAccount(&account);
  }
}

// A page's end that holds no whole block is lost, and yet every byte of the capacity can be used by one size.
TEST(BlockPool, SizesThatDoNotDivideAPageGetTheWholeCapacity) {
  for (const size_t block_bytes : {size_t{256}, size_t{384}, size_t{40960}, size_t{123392}, size_t{131072}}) {
    const int64_t capacity = int64_t{64} << 20;
    auto pool = MakePool(capacity);
    BlockAccount account = pool->OpenAccount(block_bytes);
    const int64_t count = capacity / static_cast<int64_t>(block_bytes);
    std::vector<BlockId> ids(count);
    EXPECT_TRUE(pool->Allocate(&account, count, ids.data())) << block_bytes;
    BlockId one;
    EXPECT_FALSE(pool->Allocate(&account, 1, &one));
    pool->Unref(&account, ids);
  }
}

TEST(BlockPool, AllocationIsAllOrNothing) {
  auto pool = MakePool(10 * 512);
  BlockAccount account = pool->OpenAccount(512);
  std::vector<BlockId> ids(11);
  EXPECT_FALSE(pool->Allocate(&account, 11, ids.data()));
  EXPECT_EQ(account.held, 0);
  EXPECT_EQ(pool->gauges().used_bytes, 0);
  EXPECT_TRUE(pool->Allocate(&account, 10, ids.data()));
  pool->Unref(&account, absl::MakeSpan(ids).first(10));
}

TEST(BlockPool, PromisesAreKeptFromOthers) {
  auto pool = MakePool(10 * 512);
  BlockAccount a = pool->OpenAccount(512), b = pool->OpenAccount(512);
  EXPECT_FALSE(pool->Reserve(&a, 11));
  ASSERT_TRUE(pool->Reserve(&a, 6));
  EXPECT_EQ(pool->gauges().reserved_bytes, 6 * 512);
  EXPECT_EQ(pool->gauges().used_bytes, 0);
  std::vector<BlockId> bs(5), as(6);
  EXPECT_FALSE(pool->Allocate(&b, 5, bs.data()));
  ASSERT_TRUE(pool->Allocate(&b, 4, bs.data()));
  bs.resize(4);
  ASSERT_TRUE(pool->Allocate(&a, 6, as.data()));
  EXPECT_EQ(pool->gauges().reserved_bytes, 10 * 512);
  // What the holder of a promise frees stays promised to it.
  Free(pool.get(), &a, as.back());
  as.pop_back();
  EXPECT_EQ(pool->gauges().used_bytes, 9 * 512);
  EXPECT_EQ(pool->gauges().reserved_bytes, 10 * 512);
  BlockId one;
  EXPECT_FALSE(pool->Allocate(&b, 1, &one));
  EXPECT_TRUE(pool->Allocate(&a, 1, &one));
  as.push_back(one);
  pool->Unref(&a, as);
  pool->CloseAccount(&a);
  EXPECT_TRUE(pool->Allocate(&b, 1, &one));
  bs.push_back(one);
  pool->Unref(&b, bs);
  EXPECT_EQ(pool->gauges().reserved_bytes, 0);
}

// Pages are taken by sizes: with one live block each, they can run out before the bytes do. A promise must not break.
TEST(BlockPool, PromisesSurviveFragmentation) {
  auto pool = MakePool(2 << 20);
  BlockAccount promised = pool->OpenAccount(65536);
  ASSERT_TRUE(pool->Reserve(&promised, 16));  // half of the capacity
  std::vector<BlockAccount> others;
  std::vector<BlockId> ids;
  for (size_t bytes = 512; bytes < 65536; bytes += 512) {
    others.push_back(pool->OpenAccount(bytes));
    BlockId id;
    if (!pool->Allocate(&others.back(), 1, &id)) {
      others.pop_back();
      break;
    }
    ids.push_back(id);
  }
  EXPECT_GE(ids.size(), 7u);
  std::vector<BlockId> drawn(16);
  EXPECT_TRUE(pool->Allocate(&promised, 16, drawn.data()));
  pool->Unref(&promised, drawn);
  pool->CloseAccount(&promised);
  for (size_t i = 0; i < ids.size(); i++) Free(pool.get(), &others[i], ids[i]);
  EXPECT_EQ(pool->gauges().reserved_bytes, 0);
  // And all pages are free again, for any size.
  BlockAccount last = pool->OpenAccount(131072);
  std::vector<BlockId> all(16);
  EXPECT_TRUE(pool->Allocate(&last, 16, all.data()));
  pool->Unref(&last, all);
}

TEST(BlockPool, SharedBlocksAreCountedOnce) {
  auto pool = MakePool(4 * 512);
  BlockAccount parent = pool->OpenAccount(512), child = pool->OpenAccount(512);
  std::vector<BlockId> ids(4);
  ASSERT_TRUE(pool->Allocate(&parent, 4, ids.data()));
  pool->Ref(&child, ids);
  EXPECT_EQ(pool->gauges().used_bytes, 4 * 512);
  EXPECT_EQ(pool->gauges().shared_bytes, 4 * 512);
  EXPECT_TRUE(pool->IsShared(ids[0]));
  pool->Unref(&parent, ids);
  EXPECT_EQ(pool->gauges().used_bytes, 4 * 512);
  EXPECT_EQ(pool->gauges().shared_bytes, 0);
  pool->Unref(&child, ids);
  EXPECT_EQ(pool->gauges().used_bytes, 0);
}

TEST(BlockPool, PoisonFillsNewAndFreedBlocks) {
  auto pool = MakePool(1 << 20, true);
  BlockAccount account = pool->OpenAccount(512);
  BlockId id;
  ASSERT_TRUE(pool->Allocate(&account, 1, &id));
  auto* floats = reinterpret_cast<float*>(pool->Address(id, 512));
  EXPECT_NE(floats[0], floats[0]);
  for (int i = 0; i < 128; i++) floats[i] = 1;
  Free(pool.get(), &account, id);
  EXPECT_NE(floats[127], floats[127]);
}

// Random accounts of several sizes against a model: bytes are exact, blocks never overlap, refusals change nothing.
TEST(BlockPool, RandomOperationsAgainstAModel) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  constexpr int64_t kCapacity = 6 << 20;
  auto pool = MakePool(kCapacity);
  const std::vector<size_t> sizes = {512, 1024, 24576, 65536, 131072};
  struct Holder {
    size_t bytes;
    BlockAccount account;
    std::vector<BlockId> ids;
  };
  std::vector<Holder> holders;
  std::map<BlockId, std::pair<int, size_t>> live;  // references, bytes
  const auto used = [&] {
    int64_t sum = 0;
    for (const auto& [id, entry] : live) sum += static_cast<int64_t>(entry.second);
    return sum;
  };
  const auto promised = [&] {
    int64_t sum = 0;
    for (const Holder& h : holders) sum += h.account.outstanding() * static_cast<int64_t>(h.bytes);
    return sum;
  };
  for (int step = 0; step < 20000; step++) {
    const int64_t op = below(100);
    if (holders.empty() || (op < 5 && holders.size() < 20)) {
      Holder h{sizes[below(5)], {}, {}};
      h.account = pool->OpenAccount(h.bytes);
      const int64_t want = below(3) == 0 ? below(kCapacity / 4 / static_cast<int64_t>(h.bytes)) : 0;
      (void)pool->Reserve(&h.account, want);
      holders.push_back(std::move(h));
    } else if (op < 45) {
      Holder& h = holders[below(holders.size())];
      std::vector<BlockId> ids(1 + below(40));
      const int64_t n = static_cast<int64_t>(ids.size());
      const int64_t before = used() + promised();
      const int64_t fresh = n - std::min(n, h.account.outstanding());
      const bool ok = pool->Allocate(&h.account, n, ids.data());
      const bool fits = before + fresh * static_cast<int64_t>(h.bytes) <= kCapacity;
      ASSERT_TRUE(fits || !ok);
      ASSERT_TRUE(ok || fresh > 0) << "a promise was broken";
      if (!ok) {
        ASSERT_EQ(used() + promised(), before);
        continue;
      }
      for (const BlockId id : ids) {
        ASSERT_TRUE(live.emplace(id, std::make_pair(1, h.bytes)).second);
        std::memset(pool->Address(id, h.bytes), static_cast<int>(id % 251), h.bytes);
        h.ids.push_back(id);
      }
    } else if (op < 55) {  // share some with another of the size
      Holder& from = holders[below(holders.size())];
      Holder& to = holders[below(holders.size())];
      if (from.bytes != to.bytes || from.ids.empty()) continue;
      const BlockId id = from.ids[below(from.ids.size())];
      pool->Ref(&to.account, absl::MakeSpan(&id, 1));
      to.ids.push_back(id);
      live[id].first++;
    } else if (op < 95) {
      Holder& h = holders[below(holders.size())];
      for (int64_t n = below(40); n > 0 && !h.ids.empty(); n--) {
        std::swap(h.ids[below(h.ids.size())], h.ids.back());
        const BlockId id = h.ids.back();
        h.ids.pop_back();
        const auto* bytes = reinterpret_cast<unsigned char*>(pool->Address(id, h.bytes));
        ASSERT_EQ(bytes[0], id % 251);
        ASSERT_EQ(bytes[h.bytes - 1], id % 251);
        if (--live[id].first == 0) live.erase(id);
        Free(pool.get(), &h.account, id);
      }
    } else {
      std::swap(holders[below(holders.size())], holders.back());
      for (const BlockId id : holders.back().ids) {
        if (--live[id].first == 0) live.erase(id);
      }
      pool->Unref(&holders.back().account, holders.back().ids);
      pool->CloseAccount(&holders.back().account);
      holders.pop_back();
    }
    const PoolGauges gauges = pool->gauges();
    ASSERT_EQ(gauges.used_bytes, used());
    ASSERT_EQ(gauges.reserved_bytes, used() + promised());
    ASSERT_LE(gauges.reserved_bytes, gauges.capacity_bytes);
    int64_t shared = 0;
    for (const auto& [id, entry] : live) shared += entry.first > 1 ? static_cast<int64_t>(entry.second) : 0;
    ASSERT_EQ(gauges.shared_bytes, shared);
  }
  for (Holder& h : holders) {
    pool->Unref(&h.account, h.ids);
    pool->CloseAccount(&h.account);
  }
  EXPECT_EQ(pool->gauges().reserved_bytes, 0);
  EXPECT_EQ(pool->gauges().shared_bytes, 0);
}

TEST(BlockPool, GaugesAgreeWithEachOtherWhileTheyChange) {
  auto pool = MakePool(1 << 20);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      const PoolGauges g = pool->gauges();
      ASSERT_LE(g.used_bytes, g.reserved_bytes);
      ASSERT_LE(g.reserved_bytes, g.capacity_bytes);
    }
  });
  for (int i = 0; i < 20000; i++) {
    BlockAccount account = pool->OpenAccount(512);
    ASSERT_TRUE(pool->Reserve(&account, 10));
    BlockId ids[20];
    ASSERT_TRUE(pool->Allocate(&account, 20, ids));
    pool->Unref(&account, ids);
    pool->CloseAccount(&account);
  }
  stop = true;
  reader.join();
}

}  // namespace
}  // namespace attnd

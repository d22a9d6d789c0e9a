#include "server/cache/block_pool.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

namespace attnd {

absl::StatusOr<std::unique_ptr<BlockPool>> BlockPool::Create(const Options& options) {
  absl::StatusOr<std::unique_ptr<Arena>> arena = Arena::Create(options.capacity_bytes);
  if (!arena.ok()) return arena.status();
  return std::unique_ptr<BlockPool>(new BlockPool(options, *std::move(arena)));
}

BlockPool::BlockPool(const Options& options, std::unique_ptr<Arena> arena)
    : capacity_bytes_(options.capacity_bytes),
      poison_(options.poison),
      fail_allocation_(options.fail_allocation),
      arena_(std::move(arena)),
      pages_(arena_->num_pages()) {}

BlockAccount BlockPool::OpenAccount(size_t block_bytes) {
  assert(block_bytes > 0 && block_bytes <= Arena::kPageBytes && block_bytes % 64 == 0);
  const auto [it, inserted] = size_index_.try_emplace(block_bytes, static_cast<uint32_t>(sizes_.size()));
  if (inserted) {
    SizeClass size;
    size.block_bytes = block_bytes;
    // The smallest blocks there are (F16, both dimensions 1) are one too many for the slot's bits.
    size.blocks_per_page = static_cast<uint32_t>(std::min<size_t>(Arena::kPageBytes / block_bytes, kSlotMask));
    sizes_.push_back(size);
  }
  BlockAccount account;
  account.size_class = it->second;
  return account;
}

bool BlockPool::Reserve(BlockAccount* account, int64_t blocks) {
  assert(account->held == 0 && account->reserved == 0 && blocks >= 0);
  SizeClass& size = sizes_[account->size_class];
  if (blocks > available_bytes() / static_cast<int64_t>(size.block_bytes) || MustFail(blocks)) return false;
  const int64_t pages = size.PagesFor(size.promised + blocks - size.free_slots);
  if (pages_promised_ - size.pages_promised() + pages > free_pages()) return false;
  account->reserved = blocks;
  AddPromise(&size, blocks);
  Publish();
  return true;
}

void BlockPool::CloseAccount(BlockAccount* account) {
  assert(account->held == 0);
  AddPromise(&sizes_[account->size_class], -account->reserved);
  account->reserved = 0;
  Publish();
}

bool BlockPool::Allocate(BlockAccount* account, int64_t count, BlockId* out) {
  assert(count >= 0);
  SizeClass& size = sizes_[account->size_class];
  const int64_t from_promise = std::min(count, account->outstanding());
  if (!Fits(size, from_promise, count - from_promise) || MustFail(count)) return false;
  AddPromise(&size, -from_promise);
  for (int64_t i = 0; i < count; i++) out[i] = TakeBlock(account->size_class);
  account->held += count;
  Publish();
  return true;
}

void BlockPool::Ref(BlockAccount* account, absl::Span<const BlockId> ids) {
  SizeClass& size = sizes_[account->size_class];
  Page* const pages = pages_.data();
  int64_t added = 0, now_shared = 0;
  for (const BlockId id : ids) {  // a hundred thousand of a long session: little is done for each
    if (id == kNoBlock) continue;
    assert(account->size_class == pages[id >> kSlotBits].size_class);
    now_shared += ++pages[id >> kSlotBits].refs[id & kSlotMask] == 2;
    added++;
  }
  shared_bytes_ += now_shared * static_cast<int64_t>(size.block_bytes);
  // A shared block fills a place that was promised.
  AddPromise(&size, -std::min(added, account->outstanding()));
  account->held += added;
  Publish();
}

void BlockPool::Unref(BlockAccount* account, absl::Span<const BlockId> ids) {
  for (const BlockId id : ids) {
    if (id != kNoBlock) UnrefOne(account, id);
  }
  Publish();
}

void BlockPool::UnrefOne(BlockAccount* account, BlockId id) {
  Page& page = pages_[id >> kSlotBits];
  SizeClass& size = sizes_[page.size_class];
  assert(account->held > 0 && account->size_class == page.size_class);
  uint32_t& refs = page.refs[id & kSlotMask];
  assert(refs > 0);
  account->held--;
  if (--refs == 0) {
    FreeBlock(id);
    if (account->held < account->reserved) AddPromise(&size, 1);
  } else {
    if (refs == 1) shared_bytes_ -= size.block_bytes;
    // The block stays in use by another account, so there is no memory to promise again.
    if (account->held < account->reserved) account->reserved--;
  }
}

int64_t BlockPool::free_pages() const {
  return static_cast<int64_t>(free_pages_.size()) + arena_->num_pages() - untouched_pages_;
}

bool BlockPool::Fits(const SizeClass& size, int64_t from_promise, int64_t fresh) const {
  if (fresh > available_bytes() / static_cast<int64_t>(size.block_bytes)) return false;
  const int64_t taken = size.PagesFor(from_promise + fresh - size.free_slots);
  const int64_t left = size.free_slots + taken * size.blocks_per_page - from_promise - fresh;
  const int64_t promised = size.PagesFor(size.promised - from_promise - left);
  return pages_promised_ - size.pages_promised() + promised + taken <= free_pages();
}

void BlockPool::AddPromise(SizeClass* size, int64_t blocks) {
  pages_promised_ -= size->pages_promised();
  size->promised += blocks;
  promised_bytes_ += blocks * static_cast<int64_t>(size->block_bytes);
  pages_promised_ += size->pages_promised();
  assert(size->promised >= 0 && promised_bytes_ >= 0);
}

BlockId BlockPool::TakeBlock(uint32_t size_class) {
  SizeClass& size = sizes_[size_class];
  pages_promised_ -= size.pages_promised();
  if (size.first_partial == kNone) TakePage(size_class);
  const uint32_t index = size.first_partial;
  Page& page = pages_[index];
  uint32_t slot = page.free_slot;
  if (slot != kNone) {
    page.free_slot = page.refs[slot];
  } else {
    slot = page.touched++;
  }
  page.refs[slot] = 1;
  page.live++;
  if (page.live == size.blocks_per_page) UnlinkPartial(index);
  size.free_slots--;
  pages_promised_ += size.pages_promised();
  used_bytes_ += static_cast<int64_t>(size.block_bytes);
  const BlockId id = index << kSlotBits | slot;
  if (poison_) Poison(id, size.block_bytes);
  return id;
}

void BlockPool::FreeBlock(BlockId id) {
  const uint32_t index = id >> kSlotBits;
  Page& page = pages_[index];
  SizeClass& size = sizes_[page.size_class];
  if (poison_) Poison(id, size.block_bytes);
  pages_promised_ -= size.pages_promised();
  used_bytes_ -= static_cast<int64_t>(size.block_bytes);
  page.refs[id & kSlotMask] = page.free_slot;
  page.free_slot = id & kSlotMask;
  if (page.live == size.blocks_per_page) LinkPartial(index);
  page.live--;
  size.free_slots++;
  if (page.live == 0) {
    UnlinkPartial(index);
    size.free_slots -= size.blocks_per_page;
    page = Page();
    free_pages_.push_back(index);
  }
  pages_promised_ += size.pages_promised();
}

void BlockPool::TakePage(uint32_t size_class) {
  uint32_t index;
  if (!free_pages_.empty()) {
    index = free_pages_.back();
    free_pages_.pop_back();
  } else {
    assert(untouched_pages_ < arena_->num_pages());
    index = untouched_pages_++;
  }
  SizeClass& size = sizes_[size_class];
  Page& page = pages_[index];
  page.size_class = size_class;
  page.refs = std::make_unique<uint32_t[]>(size.blocks_per_page);
  size.free_slots += size.blocks_per_page;
  LinkPartial(index);
}

void BlockPool::LinkPartial(uint32_t index) {
  Page& page = pages_[index];
  SizeClass& size = sizes_[page.size_class];
  page.prev = kNone;
  page.next = size.first_partial;
  if (page.next != kNone) pages_[page.next].prev = index;
  size.first_partial = index;
}

void BlockPool::UnlinkPartial(uint32_t index) {
  Page& page = pages_[index];
  if (page.prev != kNone) {
    pages_[page.prev].next = page.next;
  } else {
    sizes_[page.size_class].first_partial = page.next;
  }
  if (page.next != kNone) pages_[page.next].prev = page.prev;
  page.prev = page.next = kNone;
}

void BlockPool::Poison(BlockId id, size_t block_bytes) {
  std::memset(Address(id, block_bytes), 0xff, block_bytes);  // NaN in f32, bf16 and f16
}

void BlockPool::Publish() {
  gauge_sequence_.fetch_add(1);
  gauge_used_.store(used_bytes_);
  gauge_reserved_.store(used_bytes_ + promised_bytes_);
  gauge_shared_.store(shared_bytes_);
  gauge_sequence_.fetch_add(1);
}

PoolGauges BlockPool::gauges() const {
  PoolGauges g;
  g.capacity_bytes = capacity_bytes_;
  g.tokens = tokens_.load();
  for (;;) {
    const uint64_t before = gauge_sequence_.load();
    g.used_bytes = gauge_used_.load();
    g.reserved_bytes = gauge_reserved_.load();
    g.shared_bytes = gauge_shared_.load();
    if (before % 2 == 0 && gauge_sequence_.load() == before) return g;
  }
}

}  // namespace attnd

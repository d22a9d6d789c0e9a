// Blocks of KV memory: where they lie, who holds them, and how many bytes may be used in all.
//
// A block's size is its session's (BlockLayout::block_bytes). Every page of the arena serves one size while any block
// in it is live and then returns to the free pages. Blocks are reference counted, so that a fork can share them.
//
// Accounts. Every session draws from an account, which may hold a reservation: memory that is promised to it and that
// nobody else can take. Invariants, after every call:
//   1. used = bytes of all blocks with a reference, each counted once.
//   2. reserved = used + bytes promised and not yet drawn; used <= reserved <= capacity.
//   3. Pages that the promises of all sizes could need <= free pages: a promise is never broken by fragmentation.
//
// Not thread-safe (the engine's mutex guards it) but for gauges() and Address().
#ifndef ATTND_SERVER_CACHE_BLOCK_POOL_H_
#define ATTND_SERVER_CACHE_BLOCK_POOL_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/cache/arena.h"

namespace attnd {

using BlockId = uint32_t;  // page << 13 | slot
inline constexpr BlockId kNoBlock = ~BlockId{0};

struct BlockAccount {
  uint32_t size_class = 0;
  int64_t held = 0;      // references to blocks, shared ones included
  int64_t reserved = 0;  // blocks promised; the first `reserved` that it holds come out of the promise
  int64_t outstanding() const { return reserved > held ? reserved - held : 0; }
};

struct PoolGauges {
  int64_t capacity_bytes = 0;
  int64_t reserved_bytes = 0;
  int64_t used_bytes = 0;
  int64_t shared_bytes = 0;  // of blocks with more than one reference, each counted once
  int64_t tokens = 0;        // of the longest layer, summed over sessions
};

class BlockPool {
 public:
  struct Options {
    int64_t capacity_bytes = 0;
    // Tests: fills blocks with NaN when they are handed out and when they are freed.
    bool poison = false;
    // Tests: asked whenever blocks are to be taken or promised; true: there is no memory for them.
    std::function<bool()> fail_allocation = nullptr;
  };
  static absl::StatusOr<std::unique_ptr<BlockPool>> Create(const Options& options);

  // REQUIRES: 0 < block_bytes <= Arena::kPageBytes, a multiple of 64.
  BlockAccount OpenAccount(size_t block_bytes);
  // Promises `blocks` in all; false (and nothing changed) when they do not fit now. REQUIRES: nothing held.
  bool Reserve(BlockAccount* account, int64_t blocks);
  // Gives the promise back. REQUIRES: nothing held.
  void CloseAccount(BlockAccount* account);

  // All or nothing: `count` new blocks with one reference each, contents arbitrary.
  bool Allocate(BlockAccount* account, int64_t count, BlockId* out);
  // One more reference of each; kNoBlock entries are skipped, here and in Unref.
  void Ref(BlockAccount* account, absl::Span<const BlockId> ids);
  // Drops one reference of each.
  void Unref(BlockAccount* account, absl::Span<const BlockId> ids);
  bool IsShared(BlockId id) const { return refs(id) > 1; }
  uint32_t refs(BlockId id) const { return pages_[id >> kSlotBits].refs[id & kSlotMask]; }

  // Bytes that an account without a promise could still draw, fragmentation aside.
  int64_t available_bytes() const { return capacity_bytes_ - used_bytes_ - promised_bytes_; }
  int64_t capacity_bytes() const { return capacity_bytes_; }

  void AddTokens(int64_t tokens) { tokens_.fetch_add(tokens); }

  // Thread-safe.
  std::byte* Address(BlockId id, size_t block_bytes) const {
    return arena_->page(id >> kSlotBits) + (id & kSlotMask) * block_bytes;
  }
  PoolGauges gauges() const;  // consistent with each other, lock-free

 private:
  static constexpr int kSlotBits = 13;  // a page's last slot is never used: no id is kNoBlock
  static constexpr uint32_t kSlotMask = (1u << kSlotBits) - 1;
  static constexpr uint32_t kNone = ~uint32_t{0};

  struct Page {
    uint32_t size_class = kNone;
    uint32_t live = 0;                    // blocks with references
    uint32_t touched = 0;                 // slots ever handed out since the page got its size
    uint32_t free_slot = kNone;           // list of free slots below `touched`, linked through refs
    uint32_t prev = kNone, next = kNone;  // list of its size's pages with free slots
    std::unique_ptr<uint32_t[]> refs;     // reference count of a live slot, next free slot of a free one
  };
  struct SizeClass {
    size_t block_bytes = 0;
    uint32_t blocks_per_page = 0;
    uint32_t first_partial = kNone;
    int64_t free_slots = 0;  // in the pages of this size
    int64_t promised = 0;    // blocks promised to accounts and not drawn
    int64_t PagesFor(int64_t blocks) const { return blocks <= 0 ? 0 : (blocks - 1) / blocks_per_page + 1; }
    int64_t pages_promised() const { return PagesFor(promised - free_slots); }
  };

  BlockPool(const Options& options, std::unique_ptr<Arena> arena);

  int64_t free_pages() const;
  bool MustFail(int64_t blocks) const { return fail_allocation_ && blocks > 0 && fail_allocation_(); }
  bool Fits(const SizeClass& size, int64_t from_promise, int64_t fresh) const;
  void AddPromise(SizeClass* size, int64_t blocks);  // negative: takes back
  void UnrefOne(BlockAccount* account, BlockId id);
  BlockId TakeBlock(uint32_t size_class);
  void FreeBlock(BlockId id);
  void TakePage(uint32_t size_class);
  void LinkPartial(uint32_t page);
  void UnlinkPartial(uint32_t page);
  void Poison(BlockId id, size_t block_bytes);
  void Publish();

  const int64_t capacity_bytes_;
  const bool poison_;
  const std::function<bool()> fail_allocation_;
  const std::unique_ptr<Arena> arena_;

  std::vector<Page> pages_;
  std::vector<uint32_t> free_pages_;  // used before, most recent last: likely still in memory
  uint32_t untouched_pages_ = 0;      // pages [untouched_pages_, num_pages) were never used
  std::vector<SizeClass> sizes_;
  absl::flat_hash_map<size_t, uint32_t> size_index_;  // block bytes -> index in sizes_
  int64_t used_bytes_ = 0;
  int64_t promised_bytes_ = 0;
  int64_t pages_promised_ = 0;  // sum of pages_promised() over sizes
  int64_t shared_bytes_ = 0;

  // Copies for gauges(), a sequence lock: odd while they change.
  std::atomic<uint64_t> gauge_sequence_{0};
  std::atomic<int64_t> gauge_used_{0}, gauge_reserved_{0}, gauge_shared_{0};
  std::atomic<int64_t> tokens_{0};
};

}  // namespace attnd

#endif  // ATTND_SERVER_CACHE_BLOCK_POOL_H_

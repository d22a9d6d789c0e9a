// One session's keys and values: for every layer a length and the table of its blocks, and the account that its memory
// is drawn from. Also how a step's tokens get in: staged first, and visible only once committed.
//
// Staging. Tokens that follow the last one are written in place, behind the layer's length, where nobody looks. A
// replay, a rewind or an append to a block that is shared goes to fresh blocks (the kept slots are copied). So Commit
// only swaps table entries and sets the length, cannot fail, and Abort leaves the session as it was, bit for bit.
//
// Sharing. A fork holds the same blocks as its parent, each with one more reference; whoever writes to a shared block
// first gets a fresh one. Nothing is copied before that.
//
// Not thread-safe: the engine's mutex guards it. But while an append is staged, only the thread that staged it may
// commit, abort or stage, so that thread may read the tables (block, length, Address) without the mutex.
#ifndef ATTND_SERVER_CACHE_SESSION_CACHE_H_
#define ATTND_SERVER_CACHE_SESSION_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "server/cache/block_pool.h"

namespace attnd {

// Tokens [start, start + num_tokens) of a layer on their way in. Blocks from first_fresh on are `fresh`'s, earlier
// ones the layer's own.
struct StagedAppend {
  int layer = 0;
  int64_t start = 0;
  int64_t num_tokens = 0;
  int64_t first_fresh = 0;     // block index
  int64_t copied_tokens = 0;   // slots of block first_fresh to be copied from the layer's own block of that index
  std::vector<BlockId> fresh;  // [blocks, num_kv_heads]
  bool active = false;
  int64_t length() const { return start + num_tokens; }
};

class SessionCache {
 public:
  // Longest layer: positions and block indices stay far from the ends of 32 bits.
  static constexpr int64_t kMaxTokens = int64_t{1} << 30;

  SessionCache(BlockPool* pool, size_t block_bytes, int num_layers, int num_kv_heads);
  ~SessionCache();  // REQUIRES: Release has returned true
  SessionCache(const SessionCache&) = delete;
  SessionCache& operator=(const SessionCache&) = delete;

  int num_layers() const { return static_cast<int>(layers_.size()); }
  int64_t length(int layer) const { return layers_[layer].length; }
  // Position of the oldest token that the layer still holds; a multiple of the block's tokens. Not 0 once FreeBefore
  // has freed what lies before it.
  int64_t first_token(int layer) const;
  int64_t longest() const { return longest_; }
  size_t block_bytes() const { return block_bytes_; }
  int64_t used_bytes() const { return account_.held * static_cast<int64_t>(block_bytes_); }
  int64_t reserved_bytes() const {
    return (account_.held + account_.outstanding()) * static_cast<int64_t>(block_bytes_);
  }

  // Blocks that `tokens` of one layer take, all kv heads together.
  int64_t BlocksFor(int64_t tokens) const;
  // Blocks that the session would hold once tokens [start, start + num_tokens) are the layer's last.
  int64_t BlocksWith(int layer, int64_t start, int64_t num_tokens) const;

  // Reserves memory for `tokens` of every layer. REQUIRES: nothing was stored or reserved.
  bool Reserve(int64_t tokens);

  // Blocks that Stage would allocate.
  int64_t BlocksToStage(int layer, int64_t start, int64_t num_tokens) const;
  // Takes the memory; false (and nothing changed) when there is none.
  // REQUIRES: start is 0 or first_token(layer) <= start <= length(layer), num_tokens >= 1, nothing else is staged.
  bool Stage(int layer, int64_t start, int64_t num_tokens, StagedAppend* staged);
  void Commit(StagedAppend* staged);
  void Abort(StagedAppend* staged);

  // Drops the tokens from `length` on. REQUIRES: length is 0 or >= first_token(layer).
  void Truncate(int layer, int64_t length);
  // Frees the blocks whose tokens all lie before `position`. REQUIRES: position <= length(layer), nothing is staged.
  void FreeBefore(int layer, int64_t position);

  // Makes this cache hold the first `length` tokens of every layer of `from` (of a shorter layer, all). O(blocks).
  // REQUIRES: this one is empty, `from` has equal shapes, the same pool and, in each layer, its tokens before `length`
  // start before it: length is 0 or >= first_token.
  void ShareFrom(const SessionCache& from, int64_t length);
  // The same with all of its tokens, for reading them while `from` goes on: its blocks stay as they are, and its tokens
  // are not counted again. REQUIRES: this one is empty, and is only released afterwards.
  void Pin(const SessionCache& from);
  // Row i gets the tokens that row sources[i] had before the call. O(blocks).
  // REQUIRES: equal shapes, the same pool, distinct rows of which nothing is staged.
  static void Reorder(absl::Span<SessionCache* const> rows, absl::Span<const int> sources);
  // All or nothing: takes the memory for layers of these lengths from these first tokens on; contents arbitrary. False
  // (and nothing changed) when there is none. REQUIRES: this one is empty; sizes are num_layers.
  bool AllocateLayers(absl::Span<const int64_t> lengths, absl::Span<const int64_t> first_tokens);
  // Drops everything, at most about `max_blocks` at a time; true once nothing is left and the reserve is given back.
  bool Release(int64_t max_blocks);

  // Moves everything that this cache holds, its reserve too, to a cache of its own, to be released; this one is empty
  // afterwards. O(layers).
  std::unique_ptr<SessionCache> Detach();
  // Blocks that only this cache holds: what releasing it would free. O(blocks).
  int64_t CountUnshared() const;
  // Blocks that releasing it would free after the caches that were counted with the same `references` before, which are
  // those of shared blocks. O(blocks).
  int64_t CountFreedAfter(absl::flat_hash_map<BlockId, uint32_t>* references) const;

  // The layer's own block; kNoBlock when it was freed.
  BlockId block(int layer, int64_t index, int head) const {
    return layers_[layer].blocks[index * num_kv_heads_ + head];
  }
  // The same, as seen by the queries of a staged append.
  BlockId block(const StagedAppend& staged, int64_t index, int head) const {
    if (index < staged.first_fresh) return block(staged.layer, index, head);
    return staged.fresh[(index - staged.first_fresh) * num_kv_heads_ + head];
  }
  std::byte* Address(BlockId id) const { return pool_->Address(id, block_bytes_); }

 private:
  // Small for a layer without tokens: idle sessions are many.
  struct Layer {
    uint32_t length = 0;
    uint32_t capacity = 0;              // block indices that `blocks` has room for
    uint32_t first_block = 0;           // earlier ones were freed: their entries are kNoBlock
    std::unique_ptr<BlockId[]> blocks;  // [capacity, num_kv_heads]
  };

  absl::Span<const BlockId> Entries(const Layer& layer, int64_t first, int64_t last) const;  // of block indices
  bool IsShared(const Layer& layer, int64_t index) const;
  int64_t CommonBlocks(const Layer& a, const Layer& b) const;  // the first ones that are the same in both
  void Grow(Layer* layer, int64_t blocks);
  void SetLength(Layer* layer, int64_t length);

  BlockPool* const pool_;
  const size_t block_bytes_;
  const int num_kv_heads_;
  BlockAccount account_;
  bool counts_tokens_ = true;
  int64_t longest_ = 0;
  std::vector<Layer> layers_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_CACHE_SESSION_CACHE_H_

#include "server/cache/session_cache.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "absl/types/span.h"
#include "kernels/block_layout.h"

namespace attnd {
namespace {

int64_t BlockCount(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

}  // namespace

SessionCache::SessionCache(BlockPool* pool, size_t block_bytes, int num_layers, int num_kv_heads)
    : pool_(pool),
      block_bytes_(block_bytes),
      num_kv_heads_(num_kv_heads),
      account_(pool->OpenAccount(block_bytes)),
      layers_(num_layers) {}

SessionCache::~SessionCache() { assert(account_.held == 0 && account_.reserved == 0); }

int64_t SessionCache::BlocksFor(int64_t tokens) const { return BlockCount(tokens) * num_kv_heads_; }

int64_t SessionCache::BlocksWith(int layer, int64_t start, int64_t num_tokens) const {
  const int64_t held = BlocksFor(layers_[layer].length) - BlocksFor(first_token(layer));
  const int64_t freed = start == 0 ? 0 : BlocksFor(first_token(layer));  // from 0 on, nothing is left out
  return account_.held - held + BlocksFor(start + num_tokens) - freed;
}

int64_t SessionCache::first_token(int layer) const { return int64_t{layers_[layer].first_block} * kBlockTokens; }

absl::Span<const BlockId> SessionCache::Entries(const Layer& layer, int64_t first, int64_t last) const {
  return {layer.blocks.get() + first * num_kv_heads_, static_cast<size_t>((last - first) * num_kv_heads_)};
}

bool SessionCache::Reserve(int64_t tokens) {
  return pool_->Reserve(&account_, BlocksFor(tokens) * static_cast<int64_t>(layers_.size()));
}

bool SessionCache::IsShared(const Layer& layer, int64_t index) const {
  for (int h = 0; h < num_kv_heads_; h++) {
    if (pool_->IsShared(layer.blocks[index * num_kv_heads_ + h])) return true;
  }
  return false;
}

int64_t SessionCache::BlocksToStage(int layer, int64_t start, int64_t num_tokens) const {
  const Layer& l = layers_[layer];
  const bool in_place = start == l.length && start % kBlockTokens != 0 && !IsShared(l, start / kBlockTokens);
  const int64_t first_fresh = in_place ? BlockCount(start) : start / kBlockTokens;
  return (BlockCount(start + num_tokens) - first_fresh) * num_kv_heads_;
}

bool SessionCache::Stage(int layer, int64_t start, int64_t num_tokens, StagedAppend* staged) {
  Layer& l = layers_[layer];
  assert(start == 0 || (start >= first_token(layer) && start <= l.length));
  assert(num_tokens >= 1 && !staged->active);
  const int64_t fresh = BlocksToStage(layer, start, num_tokens);
  staged->fresh.resize(fresh);
  if (!pool_->Allocate(&account_, fresh, staged->fresh.data())) return false;
  staged->layer = layer;
  staged->start = start;
  staged->num_tokens = num_tokens;
  staged->first_fresh = BlockCount(start + num_tokens) - fresh / num_kv_heads_;
  staged->copied_tokens = std::max<int64_t>(0, start - staged->first_fresh * kBlockTokens);
  staged->active = true;
  Grow(&l, BlockCount(start + num_tokens));  // now, so that Commit has nothing to allocate
  return true;
}

void SessionCache::Commit(StagedAppend* staged) {
  assert(staged->active);
  Layer& l = layers_[staged->layer];
  const int64_t old_blocks = BlockCount(l.length);
  BlockId* const table = l.blocks.get();
  if (staged->first_fresh < old_blocks) {
    pool_->Unref(&account_, Entries(l, staged->first_fresh, old_blocks));
  }
  std::copy(staged->fresh.begin(), staged->fresh.end(), table + staged->first_fresh * num_kv_heads_);
  if (staged->start == 0) l.first_block = 0;
  SetLength(&l, staged->length());
  *staged = StagedAppend();
}

void SessionCache::Abort(StagedAppend* staged) {
  if (!staged->active) return;
  pool_->Unref(&account_, staged->fresh);
  *staged = StagedAppend();
}

void SessionCache::Truncate(int layer, int64_t length) {
  Layer& l = layers_[layer];
  assert(length >= 0);
  if (length >= l.length) return;
  pool_->Unref(&account_, Entries(l, BlockCount(length), BlockCount(l.length)));
  SetLength(&l, length);
  if (length == 0) l.first_block = 0;
}

void SessionCache::FreeBefore(int layer, int64_t position) {
  Layer& l = layers_[layer];
  assert(position <= l.length);
  const int64_t first = position / kBlockTokens;
  if (first <= l.first_block) return;
  pool_->Unref(&account_, Entries(l, l.first_block, first));
  std::fill(l.blocks.get() + l.first_block * num_kv_heads_, l.blocks.get() + first * num_kv_heads_, kNoBlock);
  l.first_block = static_cast<uint32_t>(first);
}

void SessionCache::ShareFrom(const SessionCache& from, int64_t length) {
  assert(account_.held == 0 && layers_.size() == from.layers_.size() && block_bytes_ == from.block_bytes_);
  for (size_t i = 0; i < layers_.size(); i++) {
    const Layer& source = from.layers_[i];
    const int64_t tokens = std::min<int64_t>(length, source.length);
    if (tokens == 0) continue;
    assert(tokens >= from.first_token(static_cast<int>(i)));
    const absl::Span<const BlockId> ids = Entries(source, 0, BlockCount(tokens));
    pool_->Ref(&account_, ids);
    Grow(&layers_[i], BlockCount(tokens));
    std::copy(ids.begin(), ids.end(), layers_[i].blocks.get());
    layers_[i].first_block = source.first_block;
    SetLength(&layers_[i], tokens);
  }
}

void SessionCache::Pin(const SessionCache& from) {
  counts_tokens_ = false;
  ShareFrom(from, from.longest_);
}

void SessionCache::Reorder(absl::Span<SessionCache* const> rows, absl::Span<const int> sources) {
  assert(rows.size() == sources.size());
  struct Taken {
    Layer layer;
    int64_t same = 0;  // blocks that the row has already, as after a common prompt: they keep their references
  };
  std::vector<std::vector<Taken>> taken(rows.size());
  for (size_t i = 0; i < rows.size(); i++) {
    SessionCache& row = *rows[i];
    const SessionCache& source = *rows[sources[i]];
    if (&row == &source) continue;
    assert(row.layers_.size() == source.layers_.size() && row.block_bytes_ == source.block_bytes_);
    taken[i].resize(row.layers_.size());
    for (size_t l = 0; l < row.layers_.size(); l++) {
      const Layer& from = source.layers_[l];
      Layer& to = taken[i][l].layer;
      const int64_t blocks = BlockCount(from.length);
      const int64_t same = taken[i][l].same = row.CommonBlocks(row.layers_[l], from);
      row.pool_->Ref(&row.account_, row.Entries(from, same, blocks));
      row.Grow(&to, blocks);
      std::copy_n(from.blocks.get(), blocks * row.num_kv_heads_, to.blocks.get());
      to.length = from.length;
      to.first_block = from.first_block;
    }
  }
  for (size_t i = 0; i < rows.size(); i++) {
    SessionCache& row = *rows[i];
    for (size_t l = 0; l < taken[i].size(); l++) {
      Layer& old = row.layers_[l];
      Layer& now = taken[i][l].layer;
      row.pool_->Unref(&row.account_, row.Entries(old, taken[i][l].same, BlockCount(old.length)));
      const uint32_t length = now.length;
      now.length = old.length;
      old = std::move(now);
      row.SetLength(&old, length);
    }
  }
}

int64_t SessionCache::CommonBlocks(const Layer& a, const Layer& b) const {
  constexpr int64_t kStride = 256;  // entries that are compared in one go
  const int64_t entries = std::min(BlockCount(a.length), BlockCount(b.length)) * num_kv_heads_;
  const BlockId *const x = a.blocks.get(), *const y = b.blocks.get();
  int64_t same = 0;
  while (same + kStride <= entries && std::memcmp(x + same, y + same, kStride * sizeof(BlockId)) == 0) same += kStride;
  while (same < entries && x[same] == y[same]) same++;
  return same / num_kv_heads_;
}

bool SessionCache::AllocateLayers(absl::Span<const int64_t> lengths, absl::Span<const int64_t> first_tokens) {
  assert(account_.held == 0 && lengths.size() == layers_.size() && first_tokens.size() == layers_.size());
  int64_t blocks = 0;
  for (size_t i = 0; i < layers_.size(); i++) blocks += BlocksFor(lengths[i]) - BlocksFor(first_tokens[i]);
  if (blocks > pool_->capacity_bytes() / static_cast<int64_t>(block_bytes_)) return false;  // and no list of them
  std::vector<BlockId> ids(blocks);
  if (!pool_->Allocate(&account_, blocks, ids.data())) return false;
  auto next = ids.begin();
  for (size_t i = 0; i < layers_.size(); i++) {
    Layer& l = layers_[i];
    Grow(&l, BlockCount(lengths[i]));
    l.first_block = static_cast<uint32_t>(first_tokens[i] / kBlockTokens);
    const int64_t freed = BlocksFor(first_tokens[i]), held = BlocksFor(lengths[i]) - freed;
    std::fill_n(l.blocks.get(), freed, kNoBlock);
    std::copy_n(next, held, l.blocks.get() + freed);
    next += held;
    SetLength(&l, lengths[i]);
  }
  return true;
}

bool SessionCache::Release(int64_t max_blocks) {
  int64_t budget = max_blocks;
  for (Layer& l : layers_) {
    if (l.length == 0) continue;
    if (budget <= 0) return false;
    const int64_t blocks = BlockCount(l.length);
    const int64_t drop = std::min(blocks, std::max<int64_t>(1, budget / num_kv_heads_));
    Truncate(static_cast<int>(&l - layers_.data()), (blocks - drop) * kBlockTokens);
    budget -= drop * num_kv_heads_;
    if (l.length > 0) return false;
  }
  layers_.clear();
  layers_.shrink_to_fit();
  pool_->CloseAccount(&account_);
  return true;
}

std::unique_ptr<SessionCache> SessionCache::Detach() {
  auto detached = std::make_unique<SessionCache>(pool_, block_bytes_, static_cast<int>(layers_.size()), num_kv_heads_);
  std::swap(detached->account_, account_);
  std::swap(detached->longest_, longest_);
  std::swap(detached->layers_, layers_);
  return detached;
}

int64_t SessionCache::CountUnshared() const {
  int64_t count = 0;
  for (const Layer& l : layers_) {
    for (const BlockId id : Entries(l, l.first_block, BlockCount(l.length))) count += pool_->IsShared(id) ? 0 : 1;
  }
  return count;
}

int64_t SessionCache::CountFreedAfter(absl::flat_hash_map<BlockId, uint32_t>* references) const {
  int64_t count = 0;
  for (const Layer& l : layers_) {
    for (const BlockId id : Entries(l, l.first_block, BlockCount(l.length))) {
      const bool is_last = !pool_->IsShared(id) || ++(*references)[id] == pool_->refs(id);
      count += is_last ? 1 : 0;
    }
  }
  return count;
}

void SessionCache::Grow(Layer* layer, int64_t blocks) {
  if (blocks <= layer->capacity) return;
  // Doubling, from what a first step needs: an idle session of one block pays for one.
  const int64_t capacity = layer->capacity == 0 ? blocks : std::max<int64_t>(blocks, 2 * int64_t{layer->capacity});
  auto table = std::make_unique_for_overwrite<BlockId[]>(capacity * num_kv_heads_);
  std::copy_n(layer->blocks.get(), BlockCount(layer->length) * num_kv_heads_, table.get());
  layer->blocks = std::move(table);
  layer->capacity = static_cast<uint32_t>(capacity);
}

void SessionCache::SetLength(Layer* layer, int64_t length) {
  const bool was_longest = layer->length == longest_;
  const bool shrinks = length < layer->length;
  const int64_t longest_before = longest_;
  layer->length = static_cast<uint32_t>(length);
  if (length > longest_) {
    longest_ = length;
  } else if (was_longest && shrinks) {
    longest_ = 0;
    for (const Layer& l : layers_) longest_ = std::max<int64_t>(longest_, l.length);
  }
  if (counts_tokens_) pool_->AddTokens(longest_ - longest_before);
}

}  // namespace attnd

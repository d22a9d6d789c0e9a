#include "server/cache/session_cache.h"

#include <algorithm>
#include <cassert>
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

int64_t SessionCache::BlocksWith(int layer, int64_t tokens) const {
  return account_.held - BlocksFor(layers_[layer].length) + BlocksFor(tokens);
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
  assert(start >= 0 && start <= l.length && num_tokens >= 1 && !staged->active);
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
    pool_->Unref(&account_,
                 absl::MakeSpan(table + staged->first_fresh * num_kv_heads_, table + old_blocks * num_kv_heads_));
  }
  std::copy(staged->fresh.begin(), staged->fresh.end(), table + staged->first_fresh * num_kv_heads_);
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
  const int64_t keep = BlockCount(length);
  pool_->Unref(&account_, absl::MakeSpan(l.blocks.get() + keep * num_kv_heads_,
                                         l.blocks.get() + BlockCount(l.length) * num_kv_heads_));
  SetLength(&l, length);
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

void SessionCache::Grow(Layer* layer, int64_t blocks) {
  if (blocks <= layer->capacity) return;
  // Doubling, from what a first step needs: an idle session of one block pays for one.
  const int64_t capacity = layer->capacity == 0 ? blocks : std::max<int64_t>(blocks, 2 * int64_t{layer->capacity});
  auto table = std::make_unique<BlockId[]>(capacity * num_kv_heads_);
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
  pool_->AddTokens(longest_ - longest_before);
}

}  // namespace attnd

#include "tests/bench/layer.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/append.h"

namespace attnd::bench {
namespace {

constexpr size_t kFromMemoryBytes = size_t{3} << 29;

size_t LayerBytes(const Options& options) {
  const int64_t blocks = (options.tokens + kBlockTokens - 1) / kBlockTokens;
  return BlockLayout(options.kv_shape()).block_bytes * options.shape.num_kv_heads * blocks;
}

}  // namespace

Layers::Layers(const Options& options, int count)
    : options_(options),
      layout_(options.kv_shape()),
      num_blocks_((options.tokens + kBlockTokens - 1) / kBlockTokens),
      layer_bytes_(LayerBytes(options)),
      count_(count > 0 ? count : static_cast<int>(std::max<size_t>(1, kFromMemoryBytes / layer_bytes_))),
      arena_(layer_bytes_ * count_) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  // Tokens are drawn from a pool whose size has no factor in common with a block's.
  std::vector<float> pool(65521 + size_t{kBlockTokens} * options.shape.head_dim);
  for (float& x : pool) x = normal(random);
  size_t next = 0;
  const size_t row_bytes = options.shape.head_dim * sizeof(float);
  for (int layer = 0; layer < count_; ++layer) {
    for (int head = 0; head < options.shape.num_kv_heads; ++head) {
      for (int64_t b = 0; b < num_blocks_; ++b, next += 8191) {
        const RowsView rows{reinterpret_cast<const std::byte*>(&pool[next % 65521]), row_bytes, DType::kF32};
        const int tokens = static_cast<int>(std::min<int64_t>(kBlockTokens, options.tokens - b * kBlockTokens));
        InitBlock(layout_, block(layer, head, b));
        WriteTokens(layout_, block(layer, head, b), 0, tokens, rows, rows);
        blocks_.push_back(block(layer, head, b));
      }
    }
  }
}

std::byte* Layers::block(int layer, int kv_head, int64_t block) const {
  return arena_.data() + layer * layer_bytes_ + (kv_head * num_blocks_ + block) * layout_.block_bytes;
}

AttentionWork Layers::Work(int layer, int64_t num_queries) {
  const size_t elements = num_queries * options_.shape.num_q_heads * options_.shape.head_dim;
  if (q_.size() < elements) {
    q_.resize(elements);
    out_.resize(elements);
    std::mt19937 random(2);
    std::normal_distribution<float> normal;
    for (float& x : q_) x = normal(random);
  }
  AttentionWork work;
  work.shape = options_.kv_shape();
  work.heads = options_.heads();
  work.softmax.softmax_scale = 1.0f / std::sqrt(static_cast<float>(options_.shape.head_dim));
  work.num_queries = num_queries;
  work.first_position = options_.tokens - num_queries;
  work.num_keys = options_.tokens;
  work.num_blocks = num_blocks_;
  work.blocks = &blocks_[layer * num_blocks_ * options_.shape.num_kv_heads];
  work.q = reinterpret_cast<const std::byte*>(q_.data());
  work.out = reinterpret_cast<std::byte*>(out_.data());
  return work;
}

}  // namespace attnd::bench

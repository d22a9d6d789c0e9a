#include "tests/bench/layer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/append.h"
#include "tests/bench/huge_memory.h"

namespace attnd::bench {

Layers::Layers(const Case& c)
    : case_(c),
      layout_(c.kv_shape()),
      num_blocks_((c.context() + kBlockTokens - 1) / kBlockTokens),
      shared_blocks_(c.shared / kBlockTokens),
      layer_bytes_(LayerBytes(c)),
      count_(LayerCount(c)),
      memory_(HugeMemory(layer_bytes_ * count_)) {
  Fill();
  Tabulate();
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  q_.resize(c.queries * c.batch * c.shape.num_q_heads * c.shape.head_dim);
  out_.resize(q_.size());
  for (float& x : q_) x = normal(random);
}

// Random tokens in the first blocks; the others are copies of these, in turn.
void Layers::Fill() {
  constexpr size_t kDistinct = 61;  // shares no factor with how many blocks anything has
  const size_t blocks = layer_bytes_ * count_ / layout_.block_bytes;
  const size_t distinct = std::min(blocks, kDistinct);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> rows(2 * size_t{kBlockTokens} * case_.shape.head_dim);
  const size_t row_bytes = case_.shape.head_dim * sizeof(float);
  for (size_t b = 0; b < distinct; ++b) {
    for (float& x : rows) x = normal(random);
    const RowsView k{reinterpret_cast<const std::byte*>(rows.data()), row_bytes, DType::kF32};
    const RowsView v{k.data + kBlockTokens * row_bytes, row_bytes, DType::kF32};
    std::byte* const block = memory_ + b * layout_.block_bytes;
    InitBlock(layout_, block);
    WriteTokens(layout_, block, 0, kBlockTokens, k, v);
  }
  for (size_t b = distinct; b < blocks; ++b) {
    std::memcpy(memory_ + b * layout_.block_bytes, memory_ + (b % distinct) * layout_.block_bytes, layout_.block_bytes);
  }
}

void Layers::Tabulate() {
  blocks_.reserve(size_t(count_) * case_.batch * case_.shape.num_kv_heads * num_blocks_);
  for (int layer = 0; layer < count_; ++layer) {
    for (int sequence = 0; sequence < case_.batch; ++sequence) {
      for (int head = 0; head < case_.shape.num_kv_heads; ++head) {
        for (int64_t b = 0; b < num_blocks_; ++b) blocks_.push_back(block(layer, sequence, head, b));
      }
    }
  }
}

std::byte* Layers::block(int layer, int sequence, int kv_head, int64_t block) const {
  const int64_t heads = case_.shape.num_kv_heads, own = num_blocks_ - shared_blocks_;
  const int64_t index = block < shared_blocks_
                            ? kv_head * shared_blocks_ + block
                            : heads * shared_blocks_ + (sequence * heads + kv_head) * own + (block - shared_blocks_);
  return data(layer) + index * layout_.block_bytes;
}

std::vector<AttentionWork> Layers::Works(int layer) {
  std::vector<AttentionWork> works(case_.batch);
  const size_t sequence_elements = q_.size() / case_.batch;
  for (int sequence = 0; sequence < case_.batch; ++sequence) {
    AttentionWork& work = works[sequence];
    work.shape = case_.kv_shape();
    work.heads = case_.heads();
    work.softmax.softmax_scale = 1.0f / std::sqrt(static_cast<float>(case_.shape.head_dim));
    work.num_queries = case_.queries;
    work.first_position = case_.context() - case_.queries;
    work.num_keys = case_.context();
    work.num_blocks = num_blocks_;
    work.blocks = &blocks_[(size_t(layer) * case_.batch + sequence) * case_.shape.num_kv_heads * num_blocks_];
    work.q = reinterpret_cast<const std::byte*>(q_.data() + sequence * sequence_elements);
    work.out = reinterpret_cast<std::byte*>(out_.data() + sequence * sequence_elements);
  }
  return works;
}

}  // namespace attnd::bench

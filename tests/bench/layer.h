// Layers of a session's cache to compute on: filled with random tokens, in an arena that is larger than any cache.
#ifndef ATTND_TESTS_BENCH_LAYER_H_
#define ATTND_TESTS_BENCH_LAYER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "tests/bench/options.h"
#include "tests/bench/roofs.h"

namespace attnd::bench {

class Layers {
 public:
  // `count` 0: as many as fill 1.5 GiB, five times the largest L3 that this project was measured on.
  Layers(const Options& options, int count);

  int count() const { return count_; }
  size_t bytes() const { return layer_bytes_; }  // of one layer
  const std::byte* data(int layer) const { return arena_.data() + layer * layer_bytes_; }
  std::byte* block(int layer, int kv_head, int64_t block) const;
  const BlockLayout& layout() const { return layout_; }

  // Queries at positions tokens - num_queries.. of one layer, with memory of their own for q and out.
  AttentionWork Work(int layer, int64_t num_queries);

 private:
  Options options_;
  BlockLayout layout_;
  int64_t num_blocks_;
  size_t layer_bytes_;
  int count_;
  HugeArena arena_;
  std::vector<const std::byte*> blocks_;  // [layer][kv head][block]
  std::vector<float> q_, out_;
};

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_LAYER_H_

// Layers of sessions' caches to compute on: one arena, filled with random tokens.
//
// A layer is one contiguous piece: the blocks that its sequences share, then each sequence's own. So "the bytes that
// must be read" are exactly a layer's bytes, each once.
#ifndef ATTND_TESTS_BENCH_LAYER_H_
#define ATTND_TESTS_BENCH_LAYER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/attention.h"
#include "tests/bench/cases.h"

namespace attnd::bench {

class Layers {
 public:
  // REQUIRES: no other Layers is alive (huge_memory.h).
  explicit Layers(const Case& c);

  int count() const { return count_; }
  size_t bytes() const { return layer_bytes_; }  // of one layer
  std::byte* data(int layer) const { return memory_ + layer * layer_bytes_; }
  std::byte* block(int layer, int sequence, int kv_head, int64_t block) const;
  const BlockLayout& layout() const { return layout_; }
  // The next layer's number: whoever reads takes its turn, so that nobody finds what another one left in a cache.
  int Next() { return turn_++ % count_; }

  // The case's queries of every sequence, against one layer; the last ones of its context.
  std::vector<AttentionWork> Works(int layer);

 private:
  void Fill();
  void Tabulate();

  const Case case_;
  const BlockLayout layout_;
  const int64_t num_blocks_;     // of a sequence and kv head
  const int64_t shared_blocks_;  // of these
  const size_t layer_bytes_;
  const int count_;
  std::byte* const memory_;
  int turn_ = 0;
  std::vector<const std::byte*> blocks_;  // [layer][sequence][kv head][block]
  std::vector<float> q_, out_;
};

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_LAYER_H_

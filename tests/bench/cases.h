// One row's question: a single value of everything that options.h lists.
#ifndef ATTND_TESTS_BENCH_CASES_H_
#define ATTND_TESTS_BENCH_CASES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/bench/options.h"

namespace attnd::bench {

struct Case {
  ModelShape shape;
  KvDType kv = KvDType::kF32;
  int64_t tokens = 0;   // of context; prefill: new ones
  int64_t history = 0;  // prefill: before them
  int64_t shared = 0;   // of the context, in blocks that the sequences have in common; a multiple of kBlockTokens
  int batch = 1;        // sequences
  int64_t queries = 1;  // of each sequence, the last ones of its context
  int threads = 1;
  Residency residency = Residency::kMemory;
  int layers = 0;  // 0: as the residency needs
  double seconds = 0;
  bool json = false;

  int64_t context() const { return history + tokens; }
  KvShape kv_shape() const { return {shape.head_dim, shape.head_dim, kv}; }
  HeadCounts heads() const { return {shape.num_q_heads, shape.num_kv_heads}; }
};

// Blocks of one layer, all sequences together, and what they take.
int64_t LayerBlocks(const Case& c);
size_t LayerBytes(const Case& c);
// Layers that the case needs in memory.
int LayerCount(const Case& c);

// Calls run(case) for every combination, threads innermost. One that cannot be measured (too large, more queries than
// tokens) is named on stderr and passed over; returns false if there was one.
bool ForEachCase(const std::string& mode, const Options& options, const std::function<void(const Case&)>& run);

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_CASES_H_

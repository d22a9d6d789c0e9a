// Attention over blocks. A caller adds the segments that are to be computed together, the batch splits them into
// tasks, and the caller's threads run the tasks in any order.
//
// Bits. An answer depends only on its own work's numbers: not on the batch's other work, the number of tasks or
// threads, nor on how a sequence's queries are cut into works. Inside a run of kRunBlocks blocks (aligned to block
// index) scores, weights and the product with V are computed in one go from zero; runs are merged in order.
// The order of the sums is made in streaming.h and amx_stream.h (products), softmax.cc (weights, runs), quantize.cc,
// for the run length of block_layout.h; the build forbids the compiler to fuse what is not written as fused
// (-ffp-contract=off).
#ifndef ATTND_KERNELS_ATTENTION_H_
#define ATTND_KERNELS_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/block_layout.h"
#include "kernels/types.h"

namespace attnd {

// The queries of one segment (or of one chunk of it) against one layer's blocks.
struct AttentionWork {
  KvShape shape;
  HeadCounts heads;
  SoftmaxOptions softmax;
  MaskView mask;

  int64_t num_queries = 0;
  int64_t first_position = 0;  // of query row 0
  int64_t num_keys = 0;        // tokens visible in the blocks: positions 0..num_keys-1

  // Block b of kv head h is blocks[h * num_blocks + b]; num_blocks = ceil(num_keys / kBlockTokens).
  // Null entries are allowed only where no row can see the block.
  const std::byte* const* blocks = nullptr;
  int64_t num_blocks = 0;

  const std::byte* q = nullptr;  // [num_queries, num_q_heads, head_dim], any alignment
  DType q_dtype = DType::kF32;
  std::byte* out = nullptr;  // [num_queries, num_q_heads, value_dim], any alignment
  DType out_dtype = DType::kF32;
  float* lse = nullptr;      // [num_queries, num_q_heads] or null; -inf for a row with no allowed key and no sink
  float* weights = nullptr;  // [num_q_heads, num_queries, num_keys] or null
};

// Row with a score or an output beyond f32: its output is unspecified.
struct AttentionResult {
  int64_t overflow_row = -1;  // query row, the smallest; -1: none
  int overflow_head = -1;     // query head
};

// First query row of `work` with no allowed key, or -1. Such a row must be refused by the caller, or is answered
// by the kernels with zeros and lse = -inf (log of exp(sink) with a sink).
int64_t FindEmptyRow(const AttentionWork& work);

// Generates every kernel that works of this shape can need (milliseconds, once per shape and process, thread-safe).
// AttentionBatch::Plan calls it too: call it early to keep compilation out of the first step.
void PrepareKernels(const KvShape& shape);
// Rows (queries x group_size) of a work below which it takes about as long with fewer, for reading the keys takes the
// time and not the products: 64 where AMX multiplies; elsewhere 16, which take a third longer by the row (f32, AVX2).
int LeastRows(const KvShape& shape);

class AttentionBatch {
 public:
  // Scratch memory for `max_threads` threads is owned by the batch and reused: a batch that has seen its largest
  // works allocates nothing any more.
  explicit AttentionBatch(int max_threads);
  ~AttentionBatch();

  void Clear();
  int Add(const AttentionWork& work);  // returns the work's index
  // Splits the works into tasks, heaviest first, and returns the number of tasks.
  int Plan();
  // Runs one task. REQUIRES: every task is run exactly once, and no two at a time with the same thread number.
  // Thread-safe; returns void and never throws.
  void Run(int task, int thread);

  // After all tasks have run.
  AttentionResult result(int work) const;
  int64_t kv_bytes_read() const;  // bytes of blocks that this batch's tasks streamed

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace attnd

#endif  // ATTND_KERNELS_ATTENTION_H_

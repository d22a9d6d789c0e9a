// The gradients of attention: of sum(d_out * out) with respect to Q, K, V and the sinks (formulas: reference.cc and
// proto/attnd/v1/attnd.proto). Nothing is kept of a forward pass: the weights are computed again.
//
// What is computed. A tile is 64 rows of one kv head (row r: query r / group_size and head r % group_size of the group)
// against 64 keys. Scores, D_P and the two sums of the row formula are float64: D_P and its mean cancel where one
// weight is near 1, and float32 would leave nothing there. Weights and D_S are then rounded to float32 for the three
// products that make D_V, D_Q and D_K.
//
// Memory. A thread at work keeps a few tiles and, for rows that see up to kKeptKeys keys, their products: at most
// 1.4 MiB, which stay for the next batch. A call: BackwardMemoryBytes. Nothing grows with num_queries x num_keys.
//
// Bits. D_Q is summed over a row's key tiles in their order, D_K and D_V over a key's row tiles in theirs, each tile's
// part from zero, and what a sum of float32 parts rounds away is kept beside it (Kahan). So no bit depends on the
// number of threads, on how the rows are cut into stretches, or on the batch's other works. (-ffp-contract=off, as in
// attention.h.)
#ifndef ATTND_KERNELS_BACKWARD_H_
#define ATTND_KERNELS_BACKWARD_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/types.h"

namespace attnd {

inline constexpr int kBackwardTileRows = 64;

// A caller's tensor, dense, any alignment.
struct BackwardTensor {
  const std::byte* data = nullptr;
  DType dtype = DType::kF32;
};

// What a row's forward pass leaves for the key tiles and for the sinks.
struct BackwardRow {
  double lse = 0;   // of a row with no allowed key: so large that every weight is 0
  double mean = 0;  // sum_j p_j u_j, which is dot(d_out, out)
};

// One whole call. Every value is finite.
struct BackwardWork {
  HeadCounts heads;
  int head_dim = 0;   // of Q and K, 1..256
  int value_dim = 0;  // of V and d_out, 1..256
  SoftmaxOptions softmax;
  MaskView mask;
  int64_t num_queries = 0;
  int64_t num_keys = 0;
  int64_t first_position = 0;  // of query row 0
  BackwardTensor q;            // [num_queries, num_q_heads, head_dim]
  BackwardTensor k;            // [num_keys, num_kv_heads, head_dim]
  BackwardTensor v;            // [num_keys, num_kv_heads, value_dim]
  BackwardTensor d_out;        // [num_queries, num_q_heads, value_dim]
  float* d_q = nullptr;        // as q
  float* d_k = nullptr;        // as k; zeros before the first stretch
  float* d_v = nullptr;        // as v; zeros before the first stretch
  // Kept from stretch to stretch: UseMemory.
  BackwardRow* rows = nullptr;  // [num_queries, num_q_heads]
  float* d_k_excess = nullptr;  // as k: what rounding has made the sums so far too large by
  float* d_v_excess = nullptr;  // as v
};

// What a call needs beside its tensors: 16 bytes for each row of each query head, 4 for each element of k and v.
int64_t BackwardMemoryBytes(const BackwardWork& work);
// REQUIRES: aligned to 8 bytes, zeros before the first stretch.
void UseMemory(std::byte* memory, BackwardWork* work);

// Row tiles of each kv head that lie within the first `queries` queries (or all, when these are all).
int64_t BackwardTiles(const BackwardWork& work, int64_t queries);
// Pairs of row and key that row tiles [begin, end) of one kv head compute: what their time goes with.
int64_t BackwardPairs(const BackwardWork& work, int64_t begin, int64_t end);

// d_sink of a query head, from the rows of a work whose tiles are all done; it may be beyond float's range. REQUIRES:
// softmax.sinks.
double SinkGradient(const BackwardWork& work, int head);

// Computes stretches of row tiles of several works, in two phases: all tasks of the first, in any order and on any
// threads, before those of the second.
class BackwardBatch {
 public:
  explicit BackwardBatch(int max_threads);
  ~BackwardBatch();

  void Clear();
  // Row tiles [begin, end) of every kv head of the work, which must live until the tasks have run. A work's stretches
  // come in order, in a batch each.
  void Add(const BackwardWork& work, int64_t begin, int64_t end);

  static constexpr int kPhases = 2;
  // Splits the stretches into tasks and makes room for the scratch of as many as run at a time. A task is a kv head,
  // all of it; where that would leave threads idle, row tiles (d_q) and then key tiles (d_k, d_v), which multiply again
  // what they need. The bits are the same.
  void Plan();
  int num_tasks(int phase) const;
  // REQUIRES: every task of a phase is run exactly once, no more than max_threads at a time. Never throws.
  void Run(int phase, int task);
  size_t scratch_bytes() const;  // of all threads

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace attnd

#endif  // ATTND_KERNELS_BACKWARD_H_

// The specification in code: scaled dot-product attention in scalar float64, straight from the formulas of
// proto/attnd/v1/attnd.proto. Every fast path is tested against it.
#ifndef ATTND_KERNELS_REFERENCE_H_
#define ATTND_KERNELS_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "kernels/types.h"

namespace attnd {

struct ReferenceInput {
  HeadCounts heads;
  int head_dim = 0;
  int value_dim = 0;
  SoftmaxOptions softmax;
  MaskView mask;
  int64_t first_position = 0;  // of query row 0
  std::vector<double> q;       // [num_queries, num_q_heads, head_dim]
  std::vector<double> k;       // [num_keys, num_kv_heads, head_dim]
  std::vector<double> v;       // [num_keys, num_kv_heads, value_dim]
};

struct ReferenceOutput {
  std::vector<double> out;      // [num_queries, num_q_heads, value_dim]
  std::vector<double> lse;      // [num_queries, num_q_heads]
  std::vector<double> weights;  // [num_q_heads, num_queries, num_keys]
};

// A row with no allowed key gets zeros and lse = -inf (with a sink: the sink).
ReferenceOutput ReferenceAttention(const ReferenceInput& input);

// The gradients of sum(d_out * out) with respect to q, k, v and the sinks.
struct ReferenceGradients {
  std::vector<double> d_q;      // as q
  std::vector<double> d_k;      // as k
  std::vector<double> d_v;      // as v
  std::vector<double> d_sinks;  // [num_q_heads]; zeros where there are no sinks
};

// d_out: [num_queries, num_q_heads, value_dim]. A row with no allowed key has no gradients.
ReferenceGradients ReferenceBackward(const ReferenceInput& input, const std::vector<double>& d_out);

}  // namespace attnd

#endif  // ATTND_KERNELS_REFERENCE_H_

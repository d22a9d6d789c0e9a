// Causal attention of one kv head in float64, fast enough to check every answer of the demo: the plain formula
// (scores, softmax with the maximum subtracted, weighted sum), vectorised but with nothing approximated. It is tested
// against the kernels' reference, which is the specification and too slow here.
#ifndef ATTND_CLIENT_TOOL_FLOAT64_HEAD_H_
#define ATTND_CLIENT_TOOL_FLOAT64_HEAD_H_

#include <cstdint>
#include <span>
#include <vector>

namespace attnd::tool {

// Not thread-safe: it has room for intermediate results.
class Float64Head {
 public:
  // k: [keys, head_dim], v: [keys, value_dim].
  Float64Head(int head_dim, int value_dim, int64_t keys, std::span<const float> k, std::span<const float> v);

  // rows query rows that all see keys 0 .. visible - 1. REQUIRES: 1 <= visible <= keys.
  //   q: [rows, head_dim], out: [rows, value_dim]
  void Attend(std::span<const double> q, int rows, int64_t visible, double softmax_scale, std::span<double> out);

 private:
  void AttendFour(const double* q, int rows, int64_t visible, double softmax_scale, double* out);

  int head_dim_;
  int value_dim_;
  int64_t padded_keys_;  // multiples of 8, the vectors' lanes; what is added is zero
  int padded_value_dim_;
  std::vector<double> k_transposed_;  // [head_dim, padded_keys]
  std::vector<double> v_;             // [padded_keys, padded_value_dim]
  std::vector<double> weights_;       // [4, padded_keys]
};

}  // namespace attnd::tool

#endif  // ATTND_CLIENT_TOOL_FLOAT64_HEAD_H_

#include "kernels/reference.h"

#include <cassert>
#include <cmath>
#include <limits>

namespace attnd {
namespace {

struct Sizes {
  int64_t queries, keys;
};

Sizes SizesOf(const ReferenceInput& in) {
  const int64_t q_row = int64_t{in.heads.num_q_heads} * in.head_dim;
  const int64_t k_row = int64_t{in.heads.num_kv_heads} * in.head_dim;
  assert(in.q.size() % q_row == 0 && in.k.size() % k_row == 0);
  return {static_cast<int64_t>(in.q.size()) / q_row, static_cast<int64_t>(in.k.size()) / k_row};
}

bool Allowed(const ReferenceInput& in, int64_t row, int64_t key) {
  const int64_t position = in.first_position + row;
  if (in.softmax.causal && key > position) return false;
  if (in.softmax.window > 0 && key <= position - in.softmax.window) return false;
  return in.mask.Allows(row, key);
}

double Score(const ReferenceInput& in, int64_t row, int head, int64_t key) {
  const int kv_head = head / in.heads.group_size();
  const double* q = &in.q[(row * in.heads.num_q_heads + head) * in.head_dim];
  const double* k = &in.k[(key * in.heads.num_kv_heads + kv_head) * in.head_dim];
  double dot = 0;
  for (int d = 0; d < in.head_dim; ++d) dot += q[d] * k[d];
  double s = double{in.softmax.softmax_scale} * dot;
  const double cap = in.softmax.softcap;
  if (cap != 0) s = cap * std::tanh(s / cap);
  if (in.softmax.alibi_slopes != nullptr) {
    s += double{in.softmax.alibi_slopes[head]} * static_cast<double>(key - (in.first_position + row));
  }
  return s;
}

// Softmax of one row, in place over its scores; -inf marks what is not allowed. Returns the log-sum-exp.
double Softmax(double* scores, int64_t keys, const float* sink) {
  const double none = -std::numeric_limits<double>::infinity();
  double max = sink != nullptr ? double{*sink} : none;
  for (int64_t j = 0; j < keys; ++j) max = std::fmax(max, scores[j]);
  double sum = 0;
  if (max != none) {
    if (sink != nullptr) sum += std::exp(*sink - max);
    for (int64_t j = 0; j < keys; ++j) sum += std::exp(scores[j] - max);
  }
  for (int64_t j = 0; j < keys; ++j) scores[j] = scores[j] == none ? 0 : std::exp(scores[j] - max) / sum;
  return max == none ? none : max + std::log(sum);
}

}  // namespace

ReferenceOutput ReferenceAttention(const ReferenceInput& in) {
  const auto [queries, keys] = SizesOf(in);
  const int heads = in.heads.num_q_heads;
  ReferenceOutput result;
  result.out.assign(queries * heads * in.value_dim, 0.0);
  result.lse.resize(queries * heads);
  result.weights.resize(heads * queries * keys);
  for (int h = 0; h < heads; ++h) {
    const int kv_head = h / in.heads.group_size();
    for (int64_t i = 0; i < queries; ++i) {
      double* weights = result.weights.data() + (h * queries + i) * keys;
      for (int64_t j = 0; j < keys; ++j) {
        weights[j] = Allowed(in, i, j) ? Score(in, i, h, j) : -std::numeric_limits<double>::infinity();
      }
      result.lse[i * heads + h] = Softmax(weights, keys, in.softmax.sinks != nullptr ? &in.softmax.sinks[h] : nullptr);
      double* out = &result.out[(i * heads + h) * in.value_dim];
      for (int64_t j = 0; j < keys; ++j) {
        if (weights[j] == 0) continue;  // what has no weight has no influence, NaN included
        const double* v = &in.v[(j * in.heads.num_kv_heads + kv_head) * in.value_dim];
        for (int c = 0; c < in.value_dim; ++c) out[c] += weights[j] * v[c];
      }
    }
  }
  return result;
}

}  // namespace attnd

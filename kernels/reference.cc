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

double ScaledDot(const ReferenceInput& in, int64_t row, int head, int64_t key) {
  const int kv_head = head / in.heads.group_size();
  const double* q = &in.q[(row * in.heads.num_q_heads + head) * in.head_dim];
  const double* k = &in.k[(key * in.heads.num_kv_heads + kv_head) * in.head_dim];
  double dot = 0;
  for (int d = 0; d < in.head_dim; ++d) dot += q[d] * k[d];
  return double{in.softmax.softmax_scale} * dot;
}

double Score(const ReferenceInput& in, int64_t row, int head, int64_t key) {
  double s = ScaledDot(in, row, head, key);
  const double cap = in.softmax.softcap;
  if (cap != 0) s = cap * std::tanh(s / cap);
  if (in.softmax.alibi_slopes != nullptr) {
    s += double{in.softmax.alibi_slopes[head]} * static_cast<double>(key - (in.first_position + row));
  }
  return s;
}

// d(score) / d(scaled dot): 1 - tanh^2 = 1 / cosh^2 of the uncapped score over the cap.
double CapSlope(const ReferenceInput& in, int64_t row, int head, int64_t key) {
  const double cap = in.softmax.softcap;
  if (cap == 0) return 1;
  const double cosh = std::cosh(ScaledDot(in, row, head, key) / cap);
  return 1 / cosh / cosh;
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

ReferenceGradients ReferenceBackward(const ReferenceInput& in, const std::vector<double>& d_out) {
  const auto [queries, keys] = SizesOf(in);
  const int heads = in.heads.num_q_heads, kv_heads = in.heads.num_kv_heads;
  const ReferenceOutput forward = ReferenceAttention(in);
  assert(d_out.size() == forward.out.size());
  ReferenceGradients result;
  result.d_q.assign(in.q.size(), 0.0);
  result.d_k.assign(in.k.size(), 0.0);
  result.d_v.assign(in.v.size(), 0.0);
  result.d_sinks.assign(heads, 0.0);
  std::vector<double> d_p(keys);
  for (int h = 0; h < heads; ++h) {
    const int kv_head = h / in.heads.group_size();
    for (int64_t i = 0; i < queries; ++i) {
      const double* p = forward.weights.data() + (h * queries + i) * keys;
      const double* u = &d_out[(i * heads + h) * in.value_dim];
      // D_V = P^T D_O and D_P = D_O V^T; what has no weight takes no part, NaN included.
      double mean = 0;  // sum_j p_j u_j of the row formula, with the u_j of d_p
      for (int64_t j = 0; j < keys; ++j) {
        d_p[j] = 0;
        if (p[j] == 0) continue;
        const int64_t row = (j * kv_heads + kv_head) * in.value_dim;
        for (int c = 0; c < in.value_dim; ++c) {
          result.d_v[row + c] += p[j] * u[c];
          d_p[j] += u[c] * in.v[row + c];
        }
        mean += p[j] * d_p[j];
      }
      // The row formula, d_s_k = p_k (u_k - sum_j p_j u_j); then D_Q = scale D_S K and D_K = scale D_S^T Q.
      const int64_t q_row = (i * heads + h) * in.head_dim;
      for (int64_t j = 0; j < keys; ++j) {
        if (p[j] == 0) continue;
        const double d_s = p[j] * (d_p[j] - mean) * CapSlope(in, i, h, j) * double{in.softmax.softmax_scale};
        const int64_t k_row = (j * kv_heads + kv_head) * in.head_dim;
        for (int d = 0; d < in.head_dim; ++d) {
          result.d_q[q_row + d] += d_s * in.k[k_row + d];
          result.d_k[k_row + d] += d_s * in.q[q_row + d];
        }
      }
      // The sink is a column with no value: its u is 0.
      if (in.softmax.sinks != nullptr) {
        result.d_sinks[h] -= std::exp(in.softmax.sinks[h] - forward.lse[i * heads + h]) * mean;
      }
    }
  }
  return result;
}

}  // namespace attnd

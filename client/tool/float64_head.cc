#include "client/tool/float64_head.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>

namespace attnd::tool {
namespace {

constexpr int kLanes = 8;
constexpr int kRows = 4;  // query rows that share each load of K or V

// The compiler splits a vector into as many registers as its target needs.
typedef double Lanes __attribute__((vector_size(kLanes * sizeof(double))));

// out[row][column] = sum over i of a[row][i] * b[i][column], for four rows of `a` and `columns` (a multiple of 8)
// columns of `b`. Both products of attention have this form: scores with b = K transposed, outputs with b = V.
struct Product {
  const double* a;
  int64_t a_stride;
  const double* b;
  int64_t b_stride;
  int64_t depth;
  int64_t columns;
  double* out;
  int64_t out_stride;
};

[[gnu::always_inline]] inline void MultiplyBody(const Product& p) {
  for (int64_t column = 0; column < p.columns; column += kLanes) {
    Lanes sum[kRows] = {};
    for (int64_t i = 0; i < p.depth; ++i) {
      Lanes b;
      std::memcpy(&b, p.b + i * p.b_stride + column, sizeof(b));
      for (int row = 0; row < kRows; ++row) sum[row] += p.a[row * p.a_stride + i] * b;
    }
    for (int row = 0; row < kRows; ++row) std::memcpy(p.out + row * p.out_stride + column, &sum[row], sizeof(Lanes));
  }
}

void MultiplyPortable(const Product& p) { MultiplyBody(p); }

#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] void MultiplyAvx2(const Product& p) { MultiplyBody(p); }
[[gnu::target("avx512f")]] void MultiplyAvx512(const Product& p) { MultiplyBody(p); }
#endif

using MultiplyFunction = void (*)(const Product&);

MultiplyFunction ChooseMultiply() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return MultiplyAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return MultiplyAvx2;
#endif
  return MultiplyPortable;
}

const MultiplyFunction kMultiply = ChooseMultiply();

int64_t RoundUp(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// Scores become weights that sum to one.
void Softmax(double* scores, int64_t count, double softmax_scale) {
  for (int64_t j = 0; j < count; ++j) scores[j] *= softmax_scale;
  const double max = *std::max_element(scores, scores + count);
  double sum = 0;
  for (int64_t j = 0; j < count; ++j) sum += scores[j] = std::exp(scores[j] - max);
  for (int64_t j = 0; j < count; ++j) scores[j] /= sum;
}

}  // namespace

Float64Head::Float64Head(int head_dim, int value_dim, int64_t keys, std::span<const float> k, std::span<const float> v)
    : head_dim_(head_dim),
      value_dim_(value_dim),
      padded_keys_(RoundUp(keys)),
      padded_value_dim_(static_cast<int>(RoundUp(value_dim))),
      k_transposed_(static_cast<size_t>(head_dim * padded_keys_)),
      v_(static_cast<size_t>(padded_keys_ * padded_value_dim_)),
      weights_(static_cast<size_t>(kRows * padded_keys_)) {
  assert(static_cast<int64_t>(k.size()) == keys * head_dim && static_cast<int64_t>(v.size()) == keys * value_dim);
  for (int64_t j = 0; j < keys; ++j) {
    for (int d = 0; d < head_dim; ++d) k_transposed_[d * padded_keys_ + j] = k[j * head_dim + d];
    for (int d = 0; d < value_dim; ++d) v_[j * padded_value_dim_ + d] = v[j * value_dim + d];
  }
}

void Float64Head::Attend(std::span<const double> q, int rows, int64_t visible, double softmax_scale,
                         std::span<double> out) {
  assert(visible >= 1 && visible <= padded_keys_);
  for (int row = 0; row < rows; row += kRows) {
    AttendFour(&q[row * head_dim_], std::min(kRows, rows - row), visible, softmax_scale, &out[row * value_dim_]);
  }
}

void Float64Head::AttendFour(const double* q, int rows, int64_t visible, double softmax_scale, double* out) {
  // Missing rows are computed as zeros and dropped. No kv head has more than 256 dims.
  double four_q[kRows * 256] = {};
  double four_out[kRows * 256];
  std::copy(q, q + rows * head_dim_, four_q);
  kMultiply({four_q, head_dim_, k_transposed_.data(), padded_keys_, head_dim_, RoundUp(visible), weights_.data(),
             padded_keys_});
  for (int row = 0; row < kRows; ++row) Softmax(&weights_[row * padded_keys_], visible, softmax_scale);
  kMultiply({weights_.data(), padded_keys_, v_.data(), padded_value_dim_, visible, padded_value_dim_, four_out,
             padded_value_dim_});
  for (int row = 0; row < rows; ++row) {
    std::copy_n(four_out + row * padded_value_dim_, value_dim_, out + row * value_dim_);
  }
}

}  // namespace attnd::tool

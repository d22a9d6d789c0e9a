#include "client/attnload/check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/tool/float64_head.h"
#include "client/tool/stored.h"

namespace attnd::attnload {
namespace {

// Of a long prefill the last rows see the most; four of them fill the reference's vectors.
constexpr int64_t kReferenceTokens = 4;
// Every answer of a kConstant session is looked at, so a long prefill's only in tokens spread over it.
constexpr int64_t kConstantTokens = 16;

// An answer of another size would be read out of bounds; it is as wrong as an answer can be.
std::optional<CheckOutcome> CheckSize(const client::SessionConfig& config, const PlannedStep& step,
                                      const client::Tensor& out) {
  const int64_t expected = step.tokens * config.num_q_heads * config.value_dim_or_default();
  if (out.dtype == client::DType::kF32 && static_cast<int64_t>(out.size()) == expected) return std::nullopt;
  CheckOutcome wrong;
  wrong.rows = 1;
  wrong.max_error = std::numeric_limits<double>::infinity();
  wrong.mismatch = absl::StrCat("layer ", step.layer, ", position ", step.position, ": expected ", expected,
                                " elements of f32, got ", out.size(), " of ", client::Name(out.dtype));
  return wrong;
}

void CompareRow(const client::SessionConfig& config, int layer, int64_t position, int head, const float* got,
                const double* expected, CheckOutcome* outcome) {
  const int dim = config.value_dim_or_default();
  const double error = tool::RelativeError(got, expected, dim);
  ++outcome->rows;
  outcome->max_error = std::max(outcome->max_error, error);
  if (error <= tool::ErrorBound(config.kv_dtype) || !outcome->mismatch.empty()) return;
  const auto off = [&](int d) {
    const double difference = std::fabs(got[d] - expected[d]);
    return std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference;
  };
  int worst = 0;
  for (int d = 1; d < dim; ++d) {
    if (off(d) > off(worst)) worst = d;
  }
  outcome->mismatch = absl::StrFormat(
      "layer %d, position %d, head %d: element %d expected %.7g, got %.7g (relative error of the row %.2g, bound %.0e)",
      layer, position, head, worst, expected[worst], got[worst], error, tool::ErrorBound(config.kv_dtype));
}

// One kv head's rows of K or V for tokens 0 .. keys - 1, as the server stores them.
std::vector<float> HeadRows(const Plan& plan, const client::SessionConfig& config, const TensorPool& pool, int layer,
                            int kv_head, TensorKind kind, int dim, int64_t keys) {
  std::vector<float> rows(static_cast<size_t>(keys * dim));
  const int64_t row = int64_t{config.num_kv_heads} * dim;
  for (int64_t j = 0; j < keys; ++j) {
    const std::span<const float> token = pool.Rows(plan.session(), layer, kind, j, 1, row);
    std::copy_n(token.begin() + int64_t{kv_head} * dim, dim, rows.begin() + j * dim);
  }
  tool::RoundAsStored(config.kv_dtype, dim, rows);
  return rows;
}

}  // namespace

CheckOutcome CheckConstant(const Plan& plan, const client::SessionConfig& config, const PlannedStep& step,
                           const client::Tensor& out) {
  if (std::optional<CheckOutcome> wrong = CheckSize(config, step, out)) return *wrong;
  const int dim = config.value_dim_or_default();
  const int group = config.num_q_heads / config.num_kv_heads;
  std::vector<double> expected(static_cast<size_t>(dim));
  const int64_t stride = (step.tokens + kConstantTokens - 1) / kConstantTokens;
  CheckOutcome outcome;
  const float* values = out.As<float>().data();
  for (int head = 0; head < config.num_q_heads; ++head) {
    std::fill(expected.begin(), expected.end(), plan.Constant(step.layer, head / group));
    for (int64_t t = step.tokens - 1; t >= 0; t -= stride) {
      CompareRow(config, step.layer, step.position + t, head, values + (t * config.num_q_heads + head) * dim,
                 expected.data(), &outcome);
    }
  }
  return outcome;
}

CheckOutcome CheckReference(const Plan& plan, const client::SessionConfig& config, const TensorPool& pool,
                            const PlannedStep& step, int kv_head, const client::Tensor& out) {
  if (std::optional<CheckOutcome> wrong = CheckSize(config, step, out)) return *wrong;
  const int dim = config.value_dim_or_default();
  const int group = config.num_q_heads / config.num_kv_heads;
  const int64_t keys = step.position + step.tokens;
  const double scale = 1.0 / std::sqrt(static_cast<double>(config.head_dim));
  tool::Float64Head head(config.head_dim, dim, keys,
                         HeadRows(plan, config, pool, step.layer, kv_head, TensorKind::kK, config.head_dim, keys),
                         HeadRows(plan, config, pool, step.layer, kv_head, TensorKind::kV, dim, keys));
  std::vector<float> q_stored(static_cast<size_t>(group * config.head_dim));
  std::vector<double> expected(static_cast<size_t>(group * dim));
  CheckOutcome outcome;
  for (int64_t t = std::max<int64_t>(0, step.tokens - kReferenceTokens); t < step.tokens; ++t) {
    const std::span<const float> token = pool.Rows(plan.session(), step.layer, TensorKind::kQ, step.position + t, 1,
                                                   int64_t{config.num_q_heads} * config.head_dim);
    std::copy_n(token.begin() + int64_t{kv_head} * group * config.head_dim, q_stored.size(), q_stored.begin());
    tool::RoundAsMultiplied(config.kv_dtype, config.head_dim, q_stored);
    const std::vector<double> q(q_stored.begin(), q_stored.end());
    head.Attend(q, group, step.position + t + 1, scale, expected);
    const float* values = out.As<float>().data() + (t * config.num_q_heads + int64_t{kv_head} * group) * dim;
    for (int g = 0; g < group; ++g) {
      CompareRow(config, step.layer, step.position + t, kv_head * group + g, values + g * dim, &expected[g * dim],
                 &outcome);
    }
  }
  return outcome;
}

}  // namespace attnd::attnload

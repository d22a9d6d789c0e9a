#include "client/attnctl/demo_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "absl/strings/str_cat.h"
#include "client/attnctl/demo_data.h"
#include "client/tool/float64_head.h"
#include "client/tool/stored.h"

namespace attnd::attnctl {
namespace {

// One kv head's rows of K or V for tokens 0 .. keys - 1.
std::vector<float> HeadRows(const DemoOptions& options, const CheckTask& task, TensorKind kind, int dim, int64_t keys) {
  std::vector<float> rows(static_cast<size_t>(keys * dim));
  const DemoData data(options.seed, task.session, task.layer, kind);
  for (int64_t j = 0; j < keys; ++j) {
    data.Fill((j * options.config.num_kv_heads + task.kv_head) * dim, std::span(rows).subspan(j * dim, dim));
  }
  tool::RoundAsStored(options.config.kv_dtype, dim, rows);
  return rows;
}

}  // namespace

CheckResult RunCheck(const DemoOptions& options, const CheckTask& task) {
  const client::SessionConfig& c = options.config;
  const int value_dim = c.value_dim_or_default();
  const int group = c.num_q_heads / c.num_kv_heads;
  const double softmax_scale = 1.0 / std::sqrt(static_cast<double>(c.head_dim));
  const int64_t keys = task.steps.back().first.position + task.steps.back().first.tokens;
  tool::Float64Head head(c.head_dim, value_dim, keys, HeadRows(options, task, TensorKind::kK, c.head_dim, keys),
                         HeadRows(options, task, TensorKind::kV, value_dim, keys));
  const DemoData queries(options.seed, task.session, task.layer, TensorKind::kQ);
  std::vector<float> q_stored(static_cast<size_t>(group * c.head_dim));
  std::vector<double> q(q_stored.size()), reference(static_cast<size_t>(group * value_dim));
  CheckResult result;
  for (const auto& [step, answer] : task.steps) {
    // A short answer would be read out of bounds below; it is as wrong as an answer can be.
    if (answer->dtype != client::DType::kF32 ||
        static_cast<int64_t>(answer->size()) != step.tokens * c.num_q_heads * value_dim) {
      result.max_error = std::numeric_limits<double>::infinity();
      result.worst = absl::StrCat("layer ", step.layer, ": an answer of ", answer->size(), " elements");
      continue;
    }
    for (int64_t t = 0; t < step.tokens; ++t) {
      const int64_t position = step.position + t;
      // The group's query heads lie side by side in a token's row.
      queries.Fill((position * c.num_q_heads + task.kv_head * group) * c.head_dim, q_stored);
      tool::RoundAsMultiplied(c.kv_dtype, c.head_dim, q_stored);
      std::copy(q_stored.begin(), q_stored.end(), q.begin());
      head.Attend(q, group, position + 1, softmax_scale, reference);
      const float* out = answer->As<float>().data() + (t * c.num_q_heads + task.kv_head * group) * value_dim;
      for (int g = 0; g < group; ++g) {
        const double error = tool::RelativeError(out + g * value_dim, &reference[g * value_dim], value_dim);
        ++result.rows;
        if (error <= result.max_error) continue;
        result.max_error = error;
        result.worst = absl::StrCat("session ", task.session, ", layer ", step.layer, ", position ", position,
                                    ", head ", task.kv_head * group + g);
      }
    }
  }
  return result;
}

void Merge(const CheckResult& from, CheckResult* into) {
  into->rows += from.rows;
  if (from.max_error > into->max_error) {
    into->max_error = from.max_error;
    into->worst = from.worst;
  }
}

}  // namespace attnd::attnctl

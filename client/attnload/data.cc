#include "client/attnload/data.h"

#include <algorithm>
#include <cassert>

#include "client/tool/random.h"

namespace attnd::attnload {
namespace {

// A prime: rows never fall on the same places again, whatever their width.
constexpr uint64_t kPeriod = 1048573;

std::vector<float> MakePool(uint64_t seed, int64_t longest, float amplitude) {
  std::vector<float> pool(kPeriod + static_cast<size_t>(longest));
  for (size_t i = 0; i < pool.size(); ++i) {
    pool[i] = amplitude * tool::SignedUnit(tool::Mix(seed + i % kPeriod));
  }
  return pool;
}

}  // namespace

TensorPool::TensorPool(uint64_t seed, int64_t longest)
    : seed_(seed),
      wide_(MakePool(tool::Mix(seed), longest, 3.0f)),
      narrow_(MakePool(tool::Mix(seed + 1), longest, 1.0f)) {}

std::span<const float> TensorPool::Rows(int64_t session, int layer, TensorKind kind, int64_t position, int64_t tokens,
                                        int64_t row) const {
  const std::vector<float>& pool = kind == TensorKind::kQ ? wide_ : narrow_;
  const uint64_t base =
      tool::Hash({seed_, static_cast<uint64_t>(session), static_cast<uint64_t>(layer), static_cast<uint64_t>(kind)});
  const uint64_t first = (base % kPeriod + static_cast<uint64_t>(position * row)) % kPeriod;
  assert(first + static_cast<uint64_t>(tokens * row) <= pool.size());
  return std::span(pool).subspan(first, static_cast<size_t>(tokens * row));
}

void FillConstant(const Plan& plan, const client::SessionConfig& config, int layer, int64_t tokens,
                  std::vector<float>* v) {
  const auto dim = static_cast<size_t>(config.value_dim_or_default());
  const size_t row = dim * static_cast<size_t>(config.num_kv_heads);
  v->resize(row * static_cast<size_t>(tokens));
  for (int head = 0; head < config.num_kv_heads; ++head) {
    std::fill_n(v->begin() + static_cast<std::ptrdiff_t>(head * dim), dim, plan.Constant(layer, head));
  }
  for (size_t at = row; at < v->size(); at += row) std::copy_n(v->begin(), row, v->begin() + at);
}

}  // namespace attnd::attnload

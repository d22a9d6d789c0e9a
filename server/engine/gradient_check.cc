#include "server/engine/gradient_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/append.h"
#include "server/engine/errors.h"

namespace attnd {
namespace {

constexpr int64_t kUnitElements = 1 << 16;
// Rough times of one thread, which decide only whether others are woken.
constexpr double kUsPerElement = 5e-4;
constexpr double kUsPerSinkRow = 2e-2;  // an exponential

}  // namespace

GradientCheck::Gradient GradientCheck::GradientOf(const BackwardWork& work, What what) {
  const int q_heads = work.heads.num_q_heads, kv_heads = work.heads.num_kv_heads;
  switch (what) {
    case What::kDQ:
      return {"d_q", work.d_q, work.num_queries, q_heads, work.head_dim};
    case What::kDK:
      return {"d_k", work.d_k, work.num_keys, kv_heads, work.head_dim};
    default:
      return {"d_v", work.d_v, work.num_keys, kv_heads, work.value_dim};
  }
}

absl::Status GradientCheck::OverflowError(const Unit& unit) {
  constexpr absl::string_view kWhy = ", or a sum on the way to it, is beyond the range of float";
  if (unit.what == What::kDSinks) {
    return MakeError(absl::StatusCode::kInvalidArgument, "GRADIENT_OVERFLOW",
                     absl::StrCat("d_sinks head ", unit.bad, kWhy),
                     {{"tensor", "d_sinks"}, {"head", absl::StrCat(unit.bad)}});
  }
  const Gradient g = GradientOf(unit.run->backward->work, unit.what);
  const int64_t row = unit.bad / (int64_t{g.heads} * g.dim), head = unit.bad / g.dim % g.heads;
  return MakeError(absl::StatusCode::kInvalidArgument, "GRADIENT_OVERFLOW",
                   absl::StrCat(g.name, " row ", row, ", head ", head, ", element ", unit.bad % g.dim, kWhy),
                   {{"tensor", std::string(g.name)}, {"row", absl::StrCat(row)}, {"head", absl::StrCat(head)}});
}

void GradientCheck::Check(Unit* unit) {
  const BackwardRun& backward = *unit->run->backward;
  if (unit->what == What::kDSinks) {
    const int head = static_cast<int>(unit->first_element);
    const double sum = SinkGradient(backward.work, head);
    if (std::abs(sum) <= double{std::numeric_limits<float>::max()}) {
      backward.d_sinks[head] = static_cast<float>(sum);
    } else {
      unit->bad = head;
    }
    return;
  }
  const float* const data = GradientOf(backward.work, unit->what).data + unit->first_element;
  const int64_t bad = FindNonFinite(reinterpret_cast<const std::byte*>(data), DType::kF32, unit->count);
  if (bad >= 0) unit->bad = unit->first_element + bad;
}

void GradientCheck::Add(SegmentRun* run) {
  if (run->backward->d_sinks != nullptr) {
    for (int h = 0; h < run->heads.num_q_heads; h++) units_.push_back({run, What::kDSinks, h, 1, -1});
  }
  for (const What what : {What::kDQ, What::kDK, What::kDV}) {
    const int64_t elements = GradientOf(run->backward->work, what).elements();
    for (int64_t first = 0; first < elements; first += kUnitElements) {
      units_.push_back({run, what, first, std::min(kUnitElements, elements - first), -1});
    }
  }
}

void GradientCheck::Run(absl::Span<const ChunkWork> chunks, ForEach for_each) {
  units_.clear();
  for (const ChunkWork& chunk : chunks) {
    if (chunk.run->backward == nullptr || !chunk.run->status.ok() || chunk.end < chunk.run->num_tokens) continue;
    Add(chunk.run);
  }
  double us = 0;
  for (const Unit& unit : units_) {
    us += unit.what == What::kDSinks ? kUsPerSinkRow * static_cast<double>(unit.run->num_tokens)
                                     : kUsPerElement * static_cast<double>(unit.count);
  }
  for_each(static_cast<int64_t>(units_.size()), us, [&](int64_t task, int) { Check(&units_[task]); });
  for (const Unit& unit : units_) {
    if (unit.bad >= 0) unit.run->status.Update(OverflowError(unit));
  }
}

}  // namespace attnd

#include "client/attnload/plan.h"

#include <algorithm>

#include "client/tool/random.h"

namespace attnd::attnload {
namespace {

// What a random number is for.
enum Purpose : uint64_t { kCheck, kAbandon, kAbandonStep, kCancel, kCancelMoment, kHead, kReference, kConstantValue };

// A reference session compares about so many of its steps: each costs a pass over its whole history in float64.
constexpr int64_t kReferenceSteps = 6;

}  // namespace

Plan::Plan(const PlanOptions& options, int64_t session)
    : options_(&options),
      session_(session),
      seed_(tool::Hash({options.seed, static_cast<uint64_t>(session)})),
      prefill_steps_((options.prefill_tokens + options.prefill_chunk - 1) / options.prefill_chunk *
                     options.config.num_layers),
      check_(tool::Unit(tool::Hash({seed_, kCheck})) < options.check_rate ? CheckKind::kReference
                                                                          : CheckKind::kConstant) {
  if (tool::Unit(tool::Hash({seed_, kAbandon})) < options.abandon_rate) {
    abandon_at_ = static_cast<int64_t>(tool::Hash({seed_, kAbandonStep}) % static_cast<uint64_t>(steps()));
  }
}

PlannedStep Plan::StepAt(int64_t index) const {
  const int layers = options_->config.num_layers;
  PlannedStep step;
  if (index < prefill_steps_) {
    step.prefill = true;
    step.layer = static_cast<int>(index % layers);
    step.position = index / layers * options_->prefill_chunk;
    step.tokens = std::min(options_->prefill_chunk, options_->prefill_tokens - step.position);
    return step;
  }
  step.decode_index = index - prefill_steps_;
  step.layer = static_cast<int>(step.decode_index % layers);
  step.position = options_->prefill_tokens + step.decode_index / layers;
  step.tokens = 1;
  return step;
}

std::optional<int> Plan::ReferenceHead(int64_t index) const {
  if (check_ != CheckKind::kReference) return std::nullopt;
  const bool always = IsLastPrefill(index) || index == steps() - 1;
  const double share = static_cast<double>(kReferenceSteps) / static_cast<double>(steps());
  if (!always && tool::Unit(tool::Hash({seed_, kReference, static_cast<uint64_t>(index)})) >= share)
    return std::nullopt;
  const uint64_t heads = static_cast<uint64_t>(options_->config.num_kv_heads);
  return static_cast<int>(tool::Hash({seed_, kHead, static_cast<uint64_t>(index)}) % heads);
}

bool Plan::Cancels(int64_t index) const {
  return tool::Unit(tool::Hash({seed_, kCancel, static_cast<uint64_t>(index)})) < options_->cancel_rate;
}

double Plan::CancelMoment(int64_t index) const {
  return tool::Unit(tool::Hash({seed_, kCancelMoment, static_cast<uint64_t>(index)}));
}

float Plan::Constant(int layer, int kv_head) const {
  const uint64_t bits =
      tool::Hash({seed_, kConstantValue, static_cast<uint64_t>(layer), static_cast<uint64_t>(kv_head)});
  // Sixteen values in each of four octaves, of either sign.
  const float fraction = 1.0f + static_cast<float>(bits & 15) / 16.0f;
  const float octave = static_cast<float>(uint64_t{1} << ((bits >> 4) & 3)) * 0.5f;
  return ((bits >> 6) & 1) != 0 ? -fraction * octave : fraction * octave;
}

}  // namespace attnd::attnload

// ValidateConfig of step_plan.h: a session's configuration.
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"
#include "server/engine/step_plan.h"

namespace attnd {
namespace {

using absl::StrCat;

constexpr int kMaxLayers = 1024;
constexpr int kMaxHeads = 4096;

absl::Status BadConfig(const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_CONFIG", message);
}

absl::Status CheckDims(const SessionConfig& c) {
  const auto in_range = [](int value, int max) { return value >= 1 && value <= max; };
  if (!in_range(c.num_layers, kMaxLayers)) {
    return BadConfig(StrCat("num_layers must be 1 to ", kMaxLayers, ", got ", c.num_layers));
  }
  if (!in_range(c.heads.num_kv_heads, kMaxHeads) || !in_range(c.heads.num_q_heads, kMaxHeads) ||
      c.heads.num_q_heads % c.heads.num_kv_heads != 0) {
    return BadConfig(StrCat("num_q_heads (", c.heads.num_q_heads, ") must be a multiple of num_kv_heads (",
                            c.heads.num_kv_heads, "), both 1 to ", kMaxHeads));
  }
  if (!in_range(c.shape.head_dim, kMaxHeadDim)) {
    return BadConfig(StrCat("head_dim must be 1 to ", kMaxHeadDim, ", got ", c.shape.head_dim));
  }
  if (!in_range(c.shape.value_dim, kMaxHeadDim)) {
    return BadConfig(StrCat("value_dim must be 1 to ", kMaxHeadDim, ", got ", c.shape.value_dim));
  }
  if (c.shape.dtype > KvDType::kInt8) {
    return BadConfig(StrCat("kv_dtype ", static_cast<int>(c.shape.dtype), " is none of F32, BF16, F16 and INT8"));
  }
  return absl::OkStatus();
}

absl::Status CheckPerHead(const char* name, const std::vector<float>& values, int num_q_heads) {
  if (!values.empty() && values.size() != static_cast<size_t>(num_q_heads)) {
    return BadConfig(StrCat(name, " must have none or num_q_heads (", num_q_heads, ") entries, got ", values.size()));
  }
  for (const float value : values) {
    if (!std::isfinite(value)) return BadConfig(StrCat(name, " must be finite"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateConfig(const SessionConfig& c) {
  absl::Status status = CheckDims(c);
  if (!status.ok()) return status;
  status.Update(CheckPerHead("alibi_slopes", c.alibi_slopes, c.heads.num_q_heads));
  status.Update(CheckPerHead("sinks", c.sinks, c.heads.num_q_heads));
  if (!status.ok()) return status;
  if (!std::isfinite(c.softmax_scale)) return BadConfig("softmax_scale must be finite");
  if (!std::isfinite(c.softcap) || c.softcap < 0) return BadConfig("softcap must be positive and finite");
  if (!c.layer_windows.empty() && c.layer_windows.size() != static_cast<size_t>(c.num_layers)) {
    return BadConfig(StrCat("layer_windows must have none or num_layers (", c.num_layers, ") entries, got ",
                            c.layer_windows.size()));
  }
  for (const int64_t window : c.layer_windows) {
    if (window < 0) return BadConfig(StrCat("a window must not be negative, got ", window));
  }
  if (c.max_tokens < 0 || c.max_tokens > SessionCache::kMaxTokens) {
    return BadConfig(StrCat("max_tokens must be 0 to ", SessionCache::kMaxTokens, ", got ", c.max_tokens));
  }
  if (c.reserve_tokens < 0 || c.reserve_tokens > SessionCache::kMaxTokens) {
    return BadConfig(StrCat("reserve_tokens must be 0 to ", SessionCache::kMaxTokens, ", got ", c.reserve_tokens));
  }
  if (c.max_tokens > 0 && c.reserve_tokens > c.max_tokens) {
    return BadConfig(StrCat("reserve_tokens (", c.reserve_tokens, ") is more than max_tokens (", c.max_tokens, ")"));
  }
  if (c.ttl < absl::ZeroDuration()) return BadConfig(StrCat("ttl must not be negative"));
  return absl::OkStatus();
}

}  // namespace attnd

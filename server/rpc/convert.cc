#include "server/rpc/convert.h"

#include <algorithm>

namespace attnd {
namespace {

// google.protobuf.Duration holds +-315,576,000,000 seconds (10,000 years).
constexpr int64_t kMaxDurationSeconds = 315'576'000'000;

}  // namespace

google::protobuf::Duration ToProtoDuration(absl::Duration duration) {
  const absl::Duration limit = absl::Seconds(kMaxDurationSeconds);
  duration = std::clamp(duration, -limit, limit);
  google::protobuf::Duration out;
  out.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &duration));
  out.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration)));
  return out;
}

google::protobuf::Timestamp ToProtoTimestamp(absl::Time time) {
  google::protobuf::Timestamp out;
  const int64_t seconds = absl::ToUnixSeconds(time);  // rounds down, so that nanos are never negative
  out.set_seconds(seconds);
  out.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(time - absl::FromUnixSeconds(seconds))));
  return out;
}

DType FromProto(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_BF16:
      return DType::kBf16;
    case v1::DTYPE_F16:
      return DType::kF16;
    default:
      return DType::kF32;
  }
}

v1::DType ToProto(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return v1::DTYPE_BF16;
    case DType::kF16:
      return v1::DTYPE_F16;
    case DType::kF32:
      break;
  }
  return v1::DTYPE_F32;
}

KvDType FromProto(v1::KvDType dtype) {
  switch (dtype) {
    case v1::KV_DTYPE_BF16:
      return KvDType::kBf16;
    case v1::KV_DTYPE_F16:
      return KvDType::kF16;
    case v1::KV_DTYPE_INT8:
      return KvDType::kInt8;
    default:
      return KvDType::kF32;
  }
}

v1::KvDType ToProto(KvDType dtype) {
  switch (dtype) {
    case KvDType::kBf16:
      return v1::KV_DTYPE_BF16;
    case KvDType::kF16:
      return v1::KV_DTYPE_F16;
    case KvDType::kInt8:
      return v1::KV_DTYPE_INT8;
    case KvDType::kF32:
      break;
  }
  return v1::KV_DTYPE_F32;
}

void ToProto(const SessionConfig& config, v1::SessionConfig* out) {
  out->set_num_layers(config.num_layers);
  out->set_num_q_heads(config.heads.num_q_heads);
  out->set_num_kv_heads(config.heads.num_kv_heads);
  out->set_head_dim(config.shape.head_dim);
  out->set_value_dim(config.shape.value_dim);
  out->set_kv_dtype(ToProto(config.shape.dtype));
  v1::SoftmaxOptions* softmax = out->mutable_softmax();
  softmax->set_softmax_scale(config.softmax_scale);
  if (config.softcap > 0) softmax->set_softcap(config.softcap);
  softmax->set_causal(config.causal);
  softmax->mutable_alibi_slopes()->Assign(config.alibi_slopes.begin(), config.alibi_slopes.end());
  softmax->mutable_sinks()->Assign(config.sinks.begin(), config.sinks.end());
  // All windows are told per layer, whichever way they were asked for.
  const auto& windows = config.layer_windows;
  if (std::any_of(windows.begin(), windows.end(), [](int64_t window) { return window > 0; })) {
    out->mutable_layer_windows()->Assign(windows.begin(), windows.end());
  }
  out->set_max_tokens(config.max_tokens);
  *out->mutable_ttl() = ToProtoDuration(config.ttl);
  out->set_reserve_tokens(config.reserve_tokens);
}

void ToProto(const SessionInfo& info, v1::Session* out) {
  out->set_session_id(info.session_id);
  ToProto(info.config, out->mutable_config());
  out->mutable_layer_lengths()->Assign(info.layer_lengths.begin(), info.layer_lengths.end());
  out->mutable_layer_first_tokens()->Assign(info.layer_first_tokens.begin(), info.layer_first_tokens.end());
  const auto longest = std::max_element(info.layer_lengths.begin(), info.layer_lengths.end());
  out->set_length(longest == info.layer_lengths.end() ? 0 : *longest);
  out->set_spilled_bytes(info.spilled_bytes);
  out->set_used_bytes(info.used_bytes);
  out->set_reserved_bytes(info.reserved_bytes);
  *out->mutable_create_time() = ToProtoTimestamp(info.create_time);
  *out->mutable_idle_time() = ToProtoDuration(info.idle_time);
  *out->mutable_time_to_live() = ToProtoDuration(info.time_to_live);
}

}  // namespace attnd

#include "client/cpp/internal/convert.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attnd/v1/attnd.pb.h"
#include "client/cpp/internal/status.h"

namespace attnd::client::internal {
namespace {

// ---- to the wire

v1::DType ToWire(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return v1::DTYPE_F32;
    case DType::kBf16:
      return v1::DTYPE_BF16;
    case DType::kF16:
      return v1::DTYPE_F16;
  }
  return v1::DTYPE_UNSPECIFIED;
}

v1::KvDType ToWire(KvDType dtype) {
  switch (dtype) {
    case KvDType::kF32:
      return v1::KV_DTYPE_F32;
    case KvDType::kBf16:
      return v1::KV_DTYPE_BF16;
    case KvDType::kF16:
      return v1::KV_DTYPE_F16;
    case KvDType::kInt8:
      return v1::KV_DTYPE_INT8;
  }
  return v1::KV_DTYPE_UNSPECIFIED;
}

v1::EmptyRows ToWire(EmptyRows rows) { return rows == EmptyRows::kZero ? v1::EMPTY_ROWS_ZERO : v1::EMPTY_ROWS_REJECT; }

void Fill(const TensorView& view, v1::Tensor* tensor) {
  tensor->set_dtype(ToWire(view.dtype()));
  tensor->set_data(view.data(), view.bytes());
}

void Fill(const BitMask& mask, v1::BitMask* wire) {
  wire->set_rows(mask.rows);
  wire->set_columns(mask.columns);
  wire->set_bits(mask.bits);
}

void Fill(const SoftmaxOptions& options, v1::SoftmaxOptions* wire) {
  if (options.softmax_scale) wire->set_softmax_scale(*options.softmax_scale);
  if (options.softcap) wire->set_softcap(*options.softcap);
  if (options.causal) wire->set_causal(*options.causal);
  if (options.window) wire->set_window(*options.window);
  wire->mutable_alibi_slopes()->Add(options.alibi_slopes.begin(), options.alibi_slopes.end());
  wire->mutable_sinks()->Add(options.sinks.begin(), options.sinks.end());
}

void Fill(absl::Duration duration, google::protobuf::Duration* wire) {
  absl::Duration rest;
  wire->set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &rest));
  wire->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(rest)));
}

// What all kinds of request have in common. An absent tensor stays unset.
template <class Request, class Wire>
void FillTensors(const Request& request, Wire* wire) {
  if (!request.q.empty()) Fill(request.q, wire->mutable_q());
  if (!request.k.empty()) Fill(request.k, wire->mutable_k());
  if (!request.v.empty()) Fill(request.v, wire->mutable_v());
  wire->set_empty_rows(ToWire(request.empty_rows));
}

template <class Request, class Wire>
void FillAnswer(const Request& request, Wire* wire) {
  wire->set_return_lse(request.return_lse);
  if (request.out_dtype) wire->set_out_dtype(ToWire(*request.out_dtype));
}

// What the stateless calls have in common.
template <class Request, class Wire>
void FillStateless(const Request& request, Wire* wire) {
  wire->set_num_queries(request.num_queries);
  wire->set_num_keys(request.num_keys);
  wire->set_num_q_heads(request.num_q_heads);
  wire->set_num_kv_heads(request.num_kv_heads);
  wire->set_head_dim(request.head_dim);
  wire->set_value_dim(request.value_dim);
  Fill(request.softmax, wire->mutable_softmax());
  if (request.query_offset) wire->set_query_offset(*request.query_offset);
  if (!request.mask.empty()) Fill(request.mask, wire->mutable_mask());
  FillTensors(request, wire);
}

// ---- from the wire

absl::Duration FromWire(const google::protobuf::Duration& wire) {
  return absl::Seconds(wire.seconds()) + absl::Nanoseconds(wire.nanos());
}

absl::StatusOr<KvDType> FromWire(v1::KvDType dtype) {
  switch (dtype) {
    case v1::KV_DTYPE_UNSPECIFIED:
    case v1::KV_DTYPE_F32:
      return KvDType::kF32;
    case v1::KV_DTYPE_BF16:
      return KvDType::kBf16;
    case v1::KV_DTYPE_F16:
      return KvDType::kF16;
    case v1::KV_DTYPE_INT8:
      return KvDType::kInt8;
    default:
      return absl::InternalError(absl::StrCat("the server answered KV dtype ", static_cast<int>(dtype)));
  }
}

absl::StatusOr<DType> FromWire(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_F32:
      return DType::kF32;
    case v1::DTYPE_BF16:
      return DType::kBf16;
    case v1::DTYPE_F16:
      return DType::kF16;
    default:
      return absl::InternalError(absl::StrCat("the server answered dtype ", static_cast<int>(dtype)));
  }
}

absl::StatusOr<Tensor> Take(v1::Tensor* wire) {
  Tensor tensor;
  if (wire->data().empty()) return tensor;
  absl::StatusOr<DType> dtype = FromWire(wire->dtype());
  if (!dtype.ok()) return dtype.status();
  if (wire->data().size() % DTypeBytes(*dtype) != 0) {
    return absl::InternalError(absl::StrCat("the server answered ", wire->data().size(), " bytes of ", Name(*dtype)));
  }
  tensor.dtype = *dtype;
  tensor.data = std::move(*wire->mutable_data());
  return tensor;
}

absl::StatusOr<std::vector<float>> TakeFloats(v1::Tensor* wire) {
  absl::StatusOr<Tensor> tensor = Take(wire);
  if (!tensor.ok()) return tensor.status();
  return tensor->ToFloats();
}

SoftmaxOptions FromWire(const v1::SoftmaxOptions& wire) {
  SoftmaxOptions options;
  if (wire.has_softmax_scale()) options.softmax_scale = wire.softmax_scale();
  if (wire.has_softcap()) options.softcap = wire.softcap();
  if (wire.has_causal()) options.causal = wire.causal();
  if (wire.has_window()) options.window = wire.window();
  options.alibi_slopes.assign(wire.alibi_slopes().begin(), wire.alibi_slopes().end());
  options.sinks.assign(wire.sinks().begin(), wire.sinks().end());
  return options;
}

absl::StatusOr<SessionConfig> FromWire(const v1::SessionConfig& wire) {
  SessionConfig config;
  absl::StatusOr<KvDType> kv_dtype = FromWire(wire.kv_dtype());
  if (!kv_dtype.ok()) return kv_dtype.status();
  config.kv_dtype = *kv_dtype;
  config.num_layers = wire.num_layers();
  config.num_q_heads = wire.num_q_heads();
  config.num_kv_heads = wire.num_kv_heads();
  config.head_dim = wire.head_dim();
  config.value_dim = wire.value_dim();
  config.softmax = FromWire(wire.softmax());
  config.layer_windows.assign(wire.layer_windows().begin(), wire.layer_windows().end());
  config.max_tokens = wire.max_tokens();
  if (wire.has_ttl()) config.ttl = FromWire(wire.ttl());
  config.reserve_tokens = wire.reserve_tokens();
  return config;
}

}  // namespace

void ToWire(const SessionConfig& config, v1::SessionConfig* wire) {
  wire->set_num_layers(config.num_layers);
  wire->set_num_q_heads(config.num_q_heads);
  wire->set_num_kv_heads(config.num_kv_heads);
  wire->set_head_dim(config.head_dim);
  wire->set_value_dim(config.value_dim);
  wire->set_kv_dtype(ToWire(config.kv_dtype));
  Fill(config.softmax, wire->mutable_softmax());
  wire->mutable_layer_windows()->Add(config.layer_windows.begin(), config.layer_windows.end());
  wire->set_max_tokens(config.max_tokens);
  if (config.ttl) Fill(*config.ttl, wire->mutable_ttl());
  wire->set_reserve_tokens(config.reserve_tokens);
}

void ToWire(const StepRequest& request, v1::StepRequest* wire) {
  wire->set_layer(request.layer);
  for (const Segment& segment : request.segments) {
    v1::Segment* out = wire->add_segments();
    out->set_session_id(segment.session_id);
    out->set_num_tokens(segment.num_tokens);
    if (segment.start_position) out->set_start_position(*segment.start_position);
    out->set_rewind(segment.rewind);
    if (!segment.mask.empty()) Fill(segment.mask, out->mutable_mask());
  }
  FillTensors(request, wire);
  FillAnswer(request, wire);
}

void ToWire(const AttendRequest& request, v1::AttendRequest* wire) {
  FillStateless(request, wire);
  FillAnswer(request, wire);
  wire->set_kv_dtype(ToWire(request.kv_dtype));
  wire->set_return_weights(request.return_weights);
}

void ToWire(const AttendBackwardRequest& request, v1::AttendBackwardRequest* wire) {
  FillStateless(request, wire);
  if (!request.d_out.empty()) Fill(request.d_out, wire->mutable_d_out());
}

absl::StatusOr<SessionInfo> FromWire(const v1::Session& wire) {
  SessionInfo info;
  absl::StatusOr<SessionConfig> config = FromWire(wire.config());
  if (!config.ok()) return config.status();
  info.session_id = wire.session_id();
  info.config = *std::move(config);
  info.length = wire.length();
  info.layer_lengths.assign(wire.layer_lengths().begin(), wire.layer_lengths().end());
  info.layer_first_tokens.assign(wire.layer_first_tokens().begin(), wire.layer_first_tokens().end());
  info.used_bytes = wire.used_bytes();
  info.spilled_bytes = wire.spilled_bytes();
  info.reserved_bytes = wire.reserved_bytes();
  info.create_time =
      absl::FromUnixSeconds(wire.create_time().seconds()) + absl::Nanoseconds(wire.create_time().nanos());
  info.idle_time = FromWire(wire.idle_time());
  info.time_to_live = FromWire(wire.time_to_live());
  return info;
}

absl::StatusOr<StepResult> FromWire(v1::StepResponse&& wire) {
  StepResult result;
  for (const v1::SegmentResult& segment : wire.segments()) {
    result.segments.push_back(
        {ExplainLostSession(FromWire(segment.status())), segment.start_position(), segment.length()});
  }
  absl::StatusOr<Tensor> out = Take(wire.mutable_out());
  if (!out.ok()) return out.status();
  absl::StatusOr<std::vector<float>> lse = TakeFloats(wire.mutable_lse());
  if (!lse.ok()) return lse.status();
  result.out = *std::move(out);
  result.lse = *std::move(lse);
  result.queue_time = absl::Nanoseconds(wire.timing().queue_ns());
  result.compute_time = absl::Nanoseconds(wire.timing().compute_ns());
  return result;
}

absl::StatusOr<AttendResult> FromWire(v1::AttendResponse&& wire) {
  AttendResult result;
  absl::StatusOr<Tensor> out = Take(wire.mutable_out());
  if (!out.ok()) return out.status();
  absl::StatusOr<std::vector<float>> lse = TakeFloats(wire.mutable_lse());
  if (!lse.ok()) return lse.status();
  absl::StatusOr<std::vector<float>> weights = TakeFloats(wire.mutable_weights());
  if (!weights.ok()) return weights.status();
  result.out = *std::move(out);
  result.lse = *std::move(lse);
  result.weights = *std::move(weights);
  return result;
}

absl::StatusOr<AttendGradients> FromWire(v1::AttendBackwardResponse&& wire) {
  AttendGradients result;
  for (const auto& [tensor, to] : {std::pair{wire.mutable_d_q(), &result.d_q},
                                   {wire.mutable_d_k(), &result.d_k},
                                   {wire.mutable_d_v(), &result.d_v}}) {
    absl::StatusOr<std::vector<float>> floats = TakeFloats(tensor);
    if (!floats.ok()) return floats.status();
    *to = *std::move(floats);
  }
  result.d_sinks.assign(wire.d_sinks().begin(), wire.d_sinks().end());
  return result;
}

ServerInfo FromWire(const v1::ServerInfo& wire) {
  ServerInfo info;
  info.version = wire.version();
  info.isa = wire.isa();
  info.onednn_version = wire.onednn_version();
  info.kernel_paths = {wire.kernel_paths().begin(), wire.kernel_paths().end()};
  info.compute_threads = wire.compute_threads();
  info.block_tokens = wire.block_tokens();
  info.max_message_bytes = wire.max_message_bytes();
  info.max_queue_tokens = wire.max_queue_tokens();
  info.max_sessions = wire.max_sessions();
  info.sessions_active = wire.sessions_active();
  info.kv_cache_capacity_bytes = wire.kv_cache_capacity_bytes();
  info.kv_cache_reserved_bytes = wire.kv_cache_reserved_bytes();
  info.kv_cache_used_bytes = wire.kv_cache_used_bytes();
  info.session_idle_ttl = FromWire(wire.session_idle_ttl());
  info.draining = wire.draining();
  info.bytes_per_token = wire.bytes_per_token();
  info.tokens_capacity = wire.tokens_capacity();
  info.tokens_available = wire.tokens_available();
  return info;
}

}  // namespace attnd::client::internal

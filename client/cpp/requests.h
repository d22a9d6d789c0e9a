// What a step and a stateless attention take and give. Shapes are row-major; tokens of several segments are ragged,
// segment after segment.
#ifndef ATTND_CLIENT_CPP_REQUESTS_H_
#define ATTND_CLIENT_CPP_REQUESTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "types.h"

namespace attnd::client {

// One session's part of a step.
struct Segment {
  std::string session_id = {};
  int64_t num_tokens = 0;  // >= 1
  // Position of the first token. Unset: append. The layer's length: append. Ending exactly at the layer's length: a
  // replay, the same place is rewritten. Lower, with `rewind`: the layer is cut there first. State it where you know
  // it: a step whose segments all state it can be retried safely, and then the client does.
  std::optional<int64_t> start_position = {};
  bool rewind = false;
  BitMask mask = {};  // [num_tokens, num_tokens] among the new tokens; empty: none
};

// One layer of one or more sessions that have the same heads and dims.
struct StepRequest {
  int layer = 0;
  std::vector<Segment> segments = {};
  TensorView q = {};  // [tokens, num_q_heads, head_dim]; absent: append only
  TensorView k = {};  // [tokens, num_kv_heads, head_dim]; K and V absent: attend only
  TensorView v = {};  // [tokens, num_kv_heads, value_dim]
  EmptyRows empty_rows = EmptyRows::kReject;
  bool return_lse = false;
  std::optional<DType> out_dtype = {};  // default: q's
};

struct SegmentResult {
  absl::Status status;  // a step of several segments answers OK as a whole and each segment for itself
  int64_t start_position = 0;
  int64_t length = 0;  // of the layer, after the step
};

struct StepResult {
  std::vector<SegmentResult> segments;
  Tensor out;              // [tokens, num_q_heads, value_dim]; zeros where a segment failed
  std::vector<float> lse;  // [tokens, num_q_heads], if asked for
  // Where the step's time went in the server.
  absl::Duration queue_time;
  absl::Duration compute_time;
};

// Stateless attention.
struct AttendRequest {
  int64_t num_queries = 0;
  int64_t num_keys = 0;
  int num_q_heads = 1;
  int num_kv_heads = 1;
  int head_dim = 1;
  int value_dim = 0;  // 0 means head_dim
  TensorView q = {};  // [num_queries, num_q_heads, head_dim]
  TensorView k = {};  // [num_keys, num_kv_heads, head_dim]
  TensorView v = {};  // [num_keys, num_kv_heads, value_dim]
  SoftmaxOptions softmax = {};
  // Position of query row 0 among the keys; causal and window with unequal counts need it.
  std::optional<int64_t> query_offset = {};
  BitMask mask = {};  // [num_queries, num_keys]
  EmptyRows empty_rows = EmptyRows::kReject;
  KvDType kv_dtype = KvDType::kF32;  // the arithmetic: as a session of that dtype would answer
  bool return_lse = false;
  bool return_weights = false;
  std::optional<DType> out_dtype = {};  // default: q's
};

struct AttendResult {
  Tensor out;                  // [num_queries, num_q_heads, value_dim]
  std::vector<float> lse;      // [num_queries, num_q_heads], if asked for
  std::vector<float> weights;  // [num_q_heads, num_queries, num_keys], if asked for
};

// The gradients of sum(d_out * out) of such an attention, in float32.
struct AttendBackwardRequest {
  int64_t num_queries = 0;
  int64_t num_keys = 0;
  int num_q_heads = 1;
  int num_kv_heads = 1;
  int head_dim = 1;
  int value_dim = 0;      // 0 means head_dim
  TensorView q = {};      // [num_queries, num_q_heads, head_dim]
  TensorView k = {};      // [num_keys, num_kv_heads, head_dim]
  TensorView v = {};      // [num_keys, num_kv_heads, value_dim]
  TensorView d_out = {};  // [num_queries, num_q_heads, value_dim]
  SoftmaxOptions softmax = {};
  std::optional<int64_t> query_offset = {};  // as in AttendRequest
  BitMask mask = {};                         // [num_queries, num_keys]
  EmptyRows empty_rows = EmptyRows::kReject;
};

struct AttendGradients {
  std::vector<float> d_q;      // the shape of q
  std::vector<float> d_k;      // the shape of k
  std::vector<float> d_v;      // the shape of v
  std::vector<float> d_sinks;  // [num_q_heads], with sinks
};

}  // namespace attnd::client

#endif  // ATTND_CLIENT_CPP_REQUESTS_H_

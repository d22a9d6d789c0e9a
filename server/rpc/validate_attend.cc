// Attend and AttendBackward: shapes, alignment of queries and keys, bounds of what is asked back.
#include "absl/strings/str_cat.h"
#include "server/rpc/convert.h"
#include "server/rpc/validate.h"

namespace attnd {
namespace {

constexpr absl::string_view kBadShape = "BAD_SHAPE";
constexpr int64_t kMaxQueryOffset = int64_t{1} << 40;

const std::byte* Bytes(const std::string& data) { return reinterpret_cast<const std::byte*>(data.data()); }

// `Request` is either call's: what they have in common has the same names.
template <class Request>
absl::Status FillShapes(const Request& request, StatelessTask* task) {
  if (request.num_queries() < 1 || request.num_keys() < 1) {
    return InvalidArgument(kBadShape, absl::StrCat("num_queries is ", request.num_queries(), " and num_keys is ",
                                                   request.num_keys(), ", but both must be >= 1"));
  }
  task->num_queries = request.num_queries();
  task->num_keys = request.num_keys();
  task->heads.num_q_heads = request.num_q_heads() == 0 ? 1 : request.num_q_heads();
  task->heads.num_kv_heads = request.num_kv_heads() == 0 ? task->heads.num_q_heads : request.num_kv_heads();
  task->shape.head_dim = request.head_dim();
  task->shape.value_dim = request.value_dim() == 0 ? request.head_dim() : request.value_dim();
  absl::Status status = CheckHeads(kBadShape, task->heads.num_q_heads, task->heads.num_kv_heads);
  if (status.ok()) status = CheckDims(kBadShape, task->shape.head_dim, task->shape.value_dim);
  return status;
}

template <class Request>
absl::Status FillTensors(const Request& request, StatelessTask* task) {
  const int64_t q_heads = task->heads.num_q_heads, kv_heads = task->heads.num_kv_heads;
  absl::Status status = CheckTensor("q", request.q(), {task->num_queries, q_heads, task->shape.head_dim});
  if (status.ok()) status = CheckTensor("k", request.k(), {task->num_keys, kv_heads, task->shape.head_dim});
  if (status.ok()) status = CheckTensor("v", request.v(), {task->num_keys, kv_heads, task->shape.value_dim});
  if (!status.ok()) return status;
  task->q = Bytes(request.q().data());
  task->k = Bytes(request.k().data());
  task->v = Bytes(request.v().data());
  task->q_dtype = FromProto(request.q().dtype());
  task->k_dtype = FromProto(request.k().dtype());
  task->v_dtype = FromProto(request.v().dtype());
  return absl::OkStatus();
}

absl::Status FillSoftmax(const v1::SoftmaxOptions& softmax, StatelessTask* task) {
  absl::Status status = CheckSoftmax(kBadShape, softmax, task->heads.num_q_heads);
  if (!status.ok()) return status;
  task->softmax.softmax_scale = SoftmaxScale(softmax, task->shape.head_dim);
  task->softmax.softcap = softmax.softcap();
  task->softmax.causal = softmax.causal();
  task->softmax.window = softmax.window();
  // Into the request, which outlives the task.
  task->softmax.alibi_slopes = softmax.alibi_slopes().empty() ? nullptr : softmax.alibi_slopes().data();
  task->softmax.sinks = softmax.sinks().empty() ? nullptr : softmax.sinks().data();
  return absl::OkStatus();
}

// The server never guesses how unequal lengths align.
template <class Request>
absl::Status FillAlignment(const Request& request, StatelessTask* task) {
  const bool uses_positions = task->softmax.causal || task->softmax.window > 0 || task->softmax.alibi_slopes != nullptr;
  if (uses_positions && task->num_queries != task->num_keys && !request.has_query_offset()) {
    return InvalidArgument(kBadShape, absl::StrCat("causal, window and alibi_slopes with ", task->num_queries,
                                                   " queries and ", task->num_keys, " keys need query_offset"));
  }
  if (request.query_offset() < 0 || request.query_offset() > kMaxQueryOffset) {
    return InvalidArgument(
        kBadShape, absl::StrCat("query_offset is ", request.query_offset(), ", but must be 0..", kMaxQueryOffset));
  }
  task->first_position = request.query_offset();
  return absl::OkStatus();
}

absl::Status CheckAnswer(const v1::AttendRequest& request, const AttendTask& task, int64_t max_answer_bytes) {
  const int64_t q_heads = task.heads.num_q_heads;
  const int64_t element_bytes = static_cast<int64_t>(DTypeBytes(task.out_dtype));
  const int64_t weights = ByteProduct({q_heads, task.num_queries, task.num_keys}, 1);
  if (request.return_weights() && (weights < 0 || weights > kMaxAttendWeights)) {
    return InvalidArgument(
        kBadShape, absl::StrCat("return_weights asks for ", q_heads, " x ", task.num_queries, " x ", task.num_keys,
                                " weights, but at most ", kMaxAttendWeights, " are returned"));
  }
  return CheckAnswerBytes({ByteProduct({task.num_queries, q_heads, task.shape.value_dim}, element_bytes),
                           request.return_lse() ? ByteProduct({task.num_queries, q_heads}, 4) : 0,
                           request.return_weights() ? weights * 4 : 0},
                          max_answer_bytes);
}

template <class Request>
absl::Status FillStateless(const Request& request, StatelessTask* task) {
  absl::Status status = FillShapes(request, task);
  if (status.ok()) status = FillTensors(request, task);
  if (status.ok()) status = FillSoftmax(request.softmax(), task);
  if (status.ok()) status = FillAlignment(request, task);
  if (status.ok() && request.has_mask()) status = CheckMask(request.mask(), task->num_queries, task->num_keys);
  if (!status.ok()) return status;
  if (request.has_mask()) {
    task->mask.bits = reinterpret_cast<const uint8_t*>(request.mask().bits().data());
    task->mask.columns = task->num_keys;
  }
  task->zero_empty_rows = request.empty_rows() == v1::EMPTY_ROWS_ZERO;
  return absl::OkStatus();
}

}  // namespace

absl::Status FillAttendTask(const v1::AttendRequest& request, int64_t max_answer_bytes, AttendTask* task) {
  absl::Status status = FillStateless(request, task);
  if (status.ok()) status = CheckKvDType(kBadShape, request.kv_dtype());
  if (status.ok() && request.out_dtype() != v1::DTYPE_UNSPECIFIED) status = CheckDType("out", request.out_dtype());
  if (!status.ok()) return status;
  task->shape.dtype = FromProto(request.kv_dtype());
  task->out_dtype = request.out_dtype() == v1::DTYPE_UNSPECIFIED ? task->q_dtype : FromProto(request.out_dtype());
  return CheckAnswer(request, *task, max_answer_bytes);
}

absl::Status FillBackwardTask(const v1::AttendBackwardRequest& request, int64_t max_answer_bytes, BackwardTask* task) {
  absl::Status status = FillStateless(request, task);
  if (!status.ok()) return status;
  const int64_t q_heads = task->heads.num_q_heads, kv_heads = task->heads.num_kv_heads;
  status = CheckTensor("d_out", request.d_out(), {task->num_queries, q_heads, task->shape.value_dim});
  if (!status.ok()) return status;
  task->d_out = Bytes(request.d_out().data());
  task->d_out_dtype = FromProto(request.d_out().dtype());
  return CheckAnswerBytes({ByteProduct({task->num_queries, q_heads, task->shape.head_dim}, 4),
                           ByteProduct({task->num_keys, kv_heads, task->shape.head_dim}, 4),
                           ByteProduct({task->num_keys, kv_heads, task->shape.value_dim}, 4), 4 * q_heads},
                          max_answer_bytes);
}

}  // namespace attnd

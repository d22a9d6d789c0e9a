// Step: what can be known without looking at the sessions.
#include "absl/strings/str_cat.h"
#include "server/rpc/convert.h"
#include "server/rpc/validate.h"

namespace attnd {
namespace {

constexpr absl::string_view kBadShape = "BAD_SHAPE";

absl::Status FillSegment(const v1::Segment& wire, StepSegment* segment) {
  if (absl::Status status = CheckSessionId(wire.session_id()); !status.ok()) return status;
  if (wire.num_tokens() < 1) {
    return InvalidArgument(kBadShape, absl::StrCat("num_tokens is ", wire.num_tokens(), ", but must be >= 1"));
  }
  segment->session_id = wire.session_id();
  segment->num_tokens = wire.num_tokens();
  if (wire.has_start_position()) segment->start_position = wire.start_position();
  segment->rewind = wire.rewind();
  if (!wire.has_mask()) return absl::OkStatus();
  if (absl::Status status = CheckMask(wire.mask(), wire.num_tokens(), wire.num_tokens()); !status.ok()) return status;
  segment->mask.bits = reinterpret_cast<const uint8_t*>(wire.mask().bits().data());
  segment->mask.columns = wire.num_tokens();
  return absl::OkStatus();
}

absl::Status FillSegments(const v1::StepRequest& request, StepTask* task, int64_t* tokens) {
  if (request.segments().empty() || request.segments_size() > kMaxSegments) {
    return InvalidArgument(kBadShape, absl::StrCat("the step has ", request.segments_size(),
                                                   " segments, but must have 1..", kMaxSegments));
  }
  *tokens = 0;
  task->segments.resize(request.segments_size());
  for (int i = 0; i < request.segments_size(); ++i) {
    if (absl::Status status = FillSegment(request.segments(i), &task->segments[i]); !status.ok()) return status;
    if (__builtin_add_overflow(*tokens, request.segments(i).num_tokens(), tokens)) {
      return InvalidArgument(kBadShape, "the segments' num_tokens add up to more than 2^63");
    }
  }
  return absl::OkStatus();
}

// A tensor of `tokens` rows has a whole number of elements in each. Also keeps tokens within what was really sent, so
// that the engine's products of tokens, heads and dims cannot wrap.
absl::Status FillTensor(absl::string_view name, const v1::Tensor& tensor, int64_t tokens, const std::byte** data,
                        size_t* bytes, DType* dtype) {
  if (tensor.data().empty()) return absl::OkStatus();
  if (absl::Status status = CheckDType(name, tensor.dtype()); !status.ok()) return status;
  *dtype = FromProto(tensor.dtype());
  const int64_t row_multiple = ByteProduct({tokens}, static_cast<int64_t>(DTypeBytes(*dtype)));
  if (row_multiple < 0 || tensor.data().size() % static_cast<size_t>(row_multiple) != 0) {
    return InvalidArgument(kBadShape, absl::StrCat(name, " holds ", tensor.data().size(), " bytes, which is not ",
                                                   tokens, " tokens of whole ", DTypeBytes(*dtype), "-byte elements"));
  }
  *data = reinterpret_cast<const std::byte*>(tensor.data().data());
  *bytes = tensor.data().size();
  return absl::OkStatus();
}

absl::Status FillTensors(const v1::StepRequest& request, int64_t tokens, StepTask* task) {
  const bool has_q = !request.q().data().empty();
  const bool has_k = !request.k().data().empty();
  const bool has_v = !request.v().data().empty();
  if (has_k != has_v) {
    return InvalidArgument(kBadShape, absl::StrCat("k holds ", request.k().data().size(), " bytes and v ",
                                                   request.v().data().size(), ", but both or neither must be sent"));
  }
  if (!has_q && !has_k) return InvalidArgument(kBadShape, "the step has neither q nor k and v");
  absl::Status status = FillTensor("q", request.q(), tokens, &task->q, &task->q_bytes, &task->q_dtype);
  if (status.ok()) status = FillTensor("k", request.k(), tokens, &task->k, &task->k_bytes, &task->k_dtype);
  if (status.ok()) status = FillTensor("v", request.v(), tokens, &task->v, &task->v_bytes, &task->v_dtype);
  return status;
}

int64_t TotalTokens(const StepTask& task) {
  int64_t tokens = 0;
  for (const StepSegment& segment : task.segments) tokens += segment.num_tokens;
  return tokens;
}

}  // namespace

absl::Status FillStepTask(const v1::StepRequest& request, StepTask* task) {
  if (request.layer() < 0) {
    return InvalidArgument(kBadShape, absl::StrCat("layer is ", request.layer(), ", but must be >= 0"));
  }
  task->layer = request.layer();
  int64_t tokens = 0;
  absl::Status status = FillSegments(request, task, &tokens);
  if (status.ok()) status = FillTensors(request, tokens, task);
  if (status.ok() && request.out_dtype() != v1::DTYPE_UNSPECIFIED) status = CheckDType("out", request.out_dtype());
  if (!status.ok()) return status;
  task->out_dtype = request.out_dtype() == v1::DTYPE_UNSPECIFIED ? task->q_dtype : FromProto(request.out_dtype());
  task->zero_empty_rows = request.empty_rows() == v1::EMPTY_ROWS_ZERO;
  task->return_lse = request.return_lse();
  return absl::OkStatus();
}

bool StepAnswerMayExceed(const StepTask& task, int64_t max_answer_bytes) {
  // At worst head_dim is 1 and value_dim the largest, and each row has an LSE.
  const int64_t q_elements = static_cast<int64_t>(task.q_bytes / DTypeBytes(task.q_dtype));
  return q_elements > max_answer_bytes / (4 * kMaxHeadDim + 4);
}

absl::Status CheckStepAnswer(const StepTask& task, const SessionConfig& config, int64_t max_answer_bytes) {
  if (task.q == nullptr) return absl::OkStatus();
  const int64_t rows = ByteProduct({TotalTokens(task), config.heads.num_q_heads}, 1);
  const int64_t element_bytes = static_cast<int64_t>(DTypeBytes(task.out_dtype));
  return CheckAnswerBytes(
      {ByteProduct({rows, config.shape.value_dim}, element_bytes), task.return_lse ? ByteProduct({rows}, 4) : 0},
      max_answer_bytes);
}

}  // namespace attnd

// The parts that every request shares: tensors, masks, heads, dims, the options of the softmax.
#include "server/rpc/validate.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "server/engine/errors.h"
#include "server/rpc/convert.h"

namespace attnd {

absl::Status InvalidArgument(absl::string_view reason, absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message);
}

int64_t ByteProduct(std::initializer_list<int64_t> shape, int64_t element_bytes) {
  int64_t product = element_bytes;
  for (const int64_t factor : shape) {
    if (factor < 0 || __builtin_mul_overflow(product, factor, &product)) return -1;
  }
  return product;
}

absl::Status CheckAnswerBytes(std::initializer_list<int64_t> parts, int64_t max_answer_bytes) {
  int64_t sum = 0;
  for (const int64_t part : parts) {
    if (part < 0 || __builtin_add_overflow(sum, part, &sum)) sum = INT64_MAX;
    if (sum == INT64_MAX) break;
  }
  if (sum <= max_answer_bytes) return absl::OkStatus();
  const std::string size = sum == INT64_MAX ? "more than 2^63" : absl::StrCat(sum);
  return MakeError(absl::StatusCode::kResourceExhausted, "MESSAGE_TOO_LARGE",
                   absl::StrCat("the answer would hold ", size, " bytes, but a message may hold at most ",
                                max_answer_bytes, " (--max_message_bytes); send fewer tokens at a time"));
}

absl::Status CheckDType(absl::string_view name, v1::DType dtype) {
  if (dtype >= v1::DTYPE_F32 && dtype <= v1::DTYPE_F16) return absl::OkStatus();
  if (dtype == v1::DTYPE_UNSPECIFIED) return InvalidArgument("BAD_SHAPE", absl::StrCat(name, " names no dtype"));
  return InvalidArgument("BAD_SHAPE", absl::StrCat(name, " has dtype ", static_cast<int>(dtype),
                                                   ", which this server does not know (1: F32, 2: BF16, 3: F16)"));
}

absl::Status CheckTensor(absl::string_view name, const v1::Tensor& tensor, std::initializer_list<int64_t> shape) {
  if (absl::Status status = CheckDType(name, tensor.dtype()); !status.ok()) return status;
  const int64_t element_bytes = static_cast<int64_t>(DTypeBytes(FromProto(tensor.dtype())));
  const int64_t expected = ByteProduct(shape, element_bytes);
  if (expected == static_cast<int64_t>(tensor.data().size())) return absl::OkStatus();
  return InvalidArgument(
      "BAD_SHAPE", absl::StrCat(name, " holds ", tensor.data().size(), " bytes, but [", absl::StrJoin(shape, ", "),
                                "] of ", element_bytes, "-byte elements is ",
                                expected < 0 ? "more than 2^63" : absl::StrCat(expected), " bytes"));
}

absl::Status CheckMask(const v1::BitMask& mask, int64_t rows, int64_t columns) {
  if (mask.rows() != rows || mask.columns() != columns) {
    return InvalidArgument("BAD_SHAPE", absl::StrCat("mask is [", mask.rows(), ", ", mask.columns(), "], but must be [",
                                                     rows, ", ", columns, "]"));
  }
  const int64_t bits = ByteProduct({rows, columns}, 1);
  const int64_t bytes = bits < 0 ? -1 : bits / 8 + (bits % 8 != 0);
  if (bytes == static_cast<int64_t>(mask.bits().size())) return absl::OkStatus();
  return InvalidArgument(
      "BAD_SHAPE", absl::StrCat("mask holds ", mask.bits().size(), " bytes, but ", rows, " x ", columns, " bits are ",
                                bytes < 0 ? "more than 2^60" : absl::StrCat(bytes), " bytes"));
}

absl::Status CheckHeads(absl::string_view reason, int64_t num_q_heads, int64_t num_kv_heads) {
  if (num_kv_heads < 1 || num_kv_heads > kMaxHeads) {
    return InvalidArgument(reason, absl::StrCat("num_kv_heads is ", num_kv_heads, ", but must be 1..", kMaxHeads));
  }
  if (num_q_heads < 1 || num_q_heads > kMaxHeads) {
    return InvalidArgument(reason, absl::StrCat("num_q_heads is ", num_q_heads, ", but must be 1..", kMaxHeads));
  }
  if (num_q_heads % num_kv_heads != 0) {
    return InvalidArgument(reason, absl::StrCat("num_q_heads is ", num_q_heads,
                                                ", which is not a multiple of num_kv_heads, ", num_kv_heads));
  }
  return absl::OkStatus();
}

absl::Status CheckDims(absl::string_view reason, int64_t head_dim, int64_t value_dim) {
  if (head_dim < 1 || head_dim > kMaxHeadDim) {
    return InvalidArgument(reason, absl::StrCat("head_dim is ", head_dim, ", but must be 1..", kMaxHeadDim));
  }
  if (value_dim < 1 || value_dim > kMaxHeadDim) {
    return InvalidArgument(reason, absl::StrCat("value_dim is ", value_dim, ", but must be 1..", kMaxHeadDim));
  }
  return absl::OkStatus();
}

absl::Status CheckKvDType(absl::string_view reason, v1::KvDType dtype) {
  if (!v1::KvDType_IsValid(dtype)) {
    return InvalidArgument(reason,
                           absl::StrCat("kv_dtype is ", static_cast<int>(dtype),
                                        ", which this server does not know (1: F32, 2: BF16, 3: F16, 4: INT8)"));
  }
  return absl::OkStatus();
}

namespace {

absl::Status CheckPerHead(absl::string_view reason, absl::string_view name, absl::Span<const float> values,
                          int num_q_heads) {
  if (!values.empty() && static_cast<int>(values.size()) != num_q_heads) {
    return InvalidArgument(reason,
                           absl::StrCat(name, " has ", values.size(), " entries for ", num_q_heads, " query heads"));
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) return InvalidArgument(reason, absl::StrCat(name, "[", i, "] is not finite"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckSoftmax(absl::string_view reason, const v1::SoftmaxOptions& softmax, int num_q_heads) {
  if (softmax.has_softmax_scale() && !std::isfinite(softmax.softmax_scale())) {
    return InvalidArgument(reason, absl::StrCat("softmax_scale is ", softmax.softmax_scale(), ", which is not finite"));
  }
  if (softmax.has_softcap() && !(softmax.softcap() > 0 && std::isfinite(softmax.softcap()))) {
    return InvalidArgument(reason, absl::StrCat("softcap is ", softmax.softcap(),
                                                ", but must be finite and > 0 (leave it unset for none)"));
  }
  if (softmax.has_window() && softmax.window() < 1) {
    return InvalidArgument(reason, absl::StrCat("window is ", softmax.window(),
                                                ", but must be >= 1: it counts the current token (leave it unset for "
                                                "none)"));
  }
  if (absl::Status s = CheckPerHead(reason, "alibi_slopes", softmax.alibi_slopes(), num_q_heads); !s.ok()) return s;
  return CheckPerHead(reason, "sinks", softmax.sinks(), num_q_heads);
}

float SoftmaxScale(const v1::SoftmaxOptions& softmax, int head_dim) {
  if (softmax.has_softmax_scale()) return softmax.softmax_scale();
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
}

}  // namespace attnd

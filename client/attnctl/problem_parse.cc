#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/attnctl/problem.h"

namespace attnd::attnctl {
namespace {

using Json = google::protobuf::Value;

absl::Status Bad(const std::string& where, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat(where, " ", what));
}

std::string Show(const Json& json) {
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(json, &text).ok()) return "a value that cannot be shown";
  return text.size() <= 40 ? text : text.substr(0, 37) + "...";
}

absl::StatusOr<double> Number(const Json& json, const std::string& where) {
  if (json.kind_case() == Json::kNumberValue) return json.number_value();
  if (json.string_value() == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (json.string_value() == "inf") return std::numeric_limits<double>::infinity();
  if (json.string_value() == "-inf") return -std::numeric_limits<double>::infinity();
  return Bad(where, absl::StrCat("is ", Show(json), ", not a number"));
}

absl::StatusOr<float> Float(const Json& json, const std::string& where) {
  absl::StatusOr<double> number = Number(json, where);
  if (!number.ok()) return number.status();
  if (std::isfinite(*number) && std::fabs(*number) > std::numeric_limits<float>::max()) {
    return Bad(where, absl::StrCat("is ", Show(json), ", beyond the range of f32"));
  }
  return static_cast<float>(*number);
}

absl::StatusOr<int64_t> Whole(const Json& json, const std::string& where) {
  const double number = json.number_value();
  // 2^53: above it a double no longer holds every whole number.
  if (json.kind_case() != Json::kNumberValue || number != std::floor(number) || std::fabs(number) > 0x1p53) {
    return Bad(where, absl::StrCat("is ", Show(json), ", not a whole number"));
  }
  return static_cast<int64_t>(number);
}

absl::StatusOr<bool> Bool(const Json& json, const std::string& where) {
  if (json.kind_case() != Json::kBoolValue) return Bad(where, absl::StrCat("is ", Show(json), ", not true or false"));
  return json.bool_value();
}

absl::StatusOr<std::vector<float>> Floats(const Json& json, const std::string& where) {
  if (json.kind_case() != Json::kListValue) return Bad(where, absl::StrCat("is ", Show(json), ", not a list"));
  std::vector<float> floats;
  for (const Json& item : json.list_value().values()) {
    absl::StatusOr<float> number = Float(item, absl::StrCat(where, "[", floats.size(), "]"));
    if (!number.ok()) return number.status();
    floats.push_back(*number);
  }
  return floats;
}

// A matrix of [rows][columns] or a tensor of [rows][heads][columns].
struct Matrix {
  int64_t rows = 0;
  int heads = 1;
  int columns = 0;
  bool with_heads = false;
  std::vector<float> values;
};

bool IsListOfLists(const Json& json) {
  return json.kind_case() == Json::kListValue && json.list_value().values_size() > 0 &&
         json.list_value().values(0).kind_case() == Json::kListValue;
}

// Appends one row of numbers; the first decides how long all are.
absl::Status AppendRow(const Json& json, const std::string& where, Matrix* matrix) {
  absl::StatusOr<std::vector<float>> row = Floats(json, where);
  if (!row.ok()) return row.status();
  const int size = static_cast<int>(row->size());
  if (size == 0) return Bad(where, "is empty");
  if (matrix->values.empty()) matrix->columns = size;
  if (size != matrix->columns) {
    return Bad(where, absl::StrCat("has ", size, " values and the rows before it have ", matrix->columns));
  }
  matrix->values.insert(matrix->values.end(), row->begin(), row->end());
  return absl::OkStatus();
}

absl::StatusOr<Matrix> ParseMatrix(const Json& json, const std::string& name) {
  if (json.kind_case() != Json::kListValue) return Bad(name, absl::StrCat("is ", Show(json), ", not a list of rows"));
  Matrix matrix;
  if (json.list_value().values_size() == 0) return Bad(name, "has no rows");
  matrix.with_heads = IsListOfLists(json.list_value().values(0));
  for (const Json& row : json.list_value().values()) {
    const std::string where = absl::StrCat(name, "[", matrix.rows++, "]");
    if (!matrix.with_heads) {
      absl::Status status = AppendRow(row, where, &matrix);
      if (!status.ok()) return status;
      continue;
    }
    if (!IsListOfLists(row)) return Bad(where, "is not a list of heads, as the first row is");
    const int heads = row.list_value().values_size();
    if (matrix.values.empty()) matrix.heads = heads;
    if (heads != matrix.heads) return Bad(where, absl::StrCat("has ", heads, " heads, not ", matrix.heads));
    for (int head = 0; head < heads; ++head) {
      absl::Status status = AppendRow(row.list_value().values(head), absl::StrCat(where, "[", head, "]"), &matrix);
      if (!status.ok()) return status;
    }
  }
  return matrix;
}

absl::StatusOr<client::BitMask> ParseMask(const Json& json) {
  client::BitMask mask;
  const auto& rows = json.list_value().values();
  for (int row = 0; row < rows.size(); ++row) {
    const std::string where = absl::StrCat("mask[", row, "]");
    const auto& bits = rows[row].list_value().values();
    if (row == 0) mask = client::BitMask::Filled(rows.size(), bits.size(), false);
    if (bits.size() != mask.columns) {
      return Bad(where, absl::StrCat("has ", bits.size(), " values, not ", mask.columns));
    }
    for (int column = 0; column < bits.size(); ++column) {
      absl::StatusOr<bool> bit = Bool(bits[column], absl::StrCat(where, "[", column, "]"));
      if (!bit.ok()) return bit.status();
      mask.Set(row, column, *bit);
    }
  }
  if (mask.empty()) return Bad("mask", absl::StrCat("is ", Show(json), ", not a list of rows of true and false"));
  return mask;
}

// Moves what was parsed to where it belongs, or passes its error on.
template <class T, class To>
absl::Status Assign(absl::StatusOr<T> value, To* to) {
  if (!value.ok()) return value.status();
  *to = *std::move(value);
  return absl::OkStatus();
}

absl::Status SetOption(const std::string& key, const Json& json, client::AttendRequest* request) {
  client::SoftmaxOptions& softmax = request->softmax;
  if (key == "name") return absl::OkStatus();
  if (key == "scale") return Assign(Float(json, key), &softmax.softmax_scale);
  if (key == "softcap") return Assign(Float(json, key), &softmax.softcap);
  if (key == "causal") return Assign(Bool(json, key), &softmax.causal);
  if (key == "window") return Assign(Whole(json, key), &softmax.window);
  if (key == "sinks") return Assign(Floats(json, key), &softmax.sinks);
  if (key == "alibi_slopes") return Assign(Floats(json, key), &softmax.alibi_slopes);
  if (key == "query_offset") return Assign(Whole(json, key), &request->query_offset);
  if (key == "mask") return Assign(ParseMask(json), &request->mask);
  if (key == "kv") {
    const std::optional<client::KvDType> dtype = client::ParseKvDType(json.string_value());
    if (!dtype) return Bad(key, absl::StrCat("is ", Show(json), ", not one of f32, bf16, f16, int8"));
    request->kv_dtype = *dtype;
    return absl::OkStatus();
  }
  if (key == "empty_rows") {
    const std::string& choice = json.string_value();
    if (choice != "zero" && choice != "reject")
      return Bad(key, absl::StrCat("is ", Show(json), ", not zero or reject"));
    request->empty_rows = choice == "zero" ? client::EmptyRows::kZero : client::EmptyRows::kReject;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown key '", key, "'"));
}

absl::Status CheckAgreement(const Matrix& q, const Matrix& k, const Matrix& v) {
  if (q.with_heads != k.with_heads || k.with_heads != v.with_heads) {
    return absl::InvalidArgumentError("q, k and v must all have a dimension of heads, or none of them");
  }
  // What the byte counts could hide from the server: it sees flat tensors.
  if (q.columns != k.columns) return Bad("q", absl::StrCat("has rows of ", q.columns, " and k of ", k.columns));
  if (k.rows != v.rows) return Bad("k", absl::StrCat("has ", k.rows, " rows and v has ", v.rows));
  if (k.heads != v.heads) return Bad("k", absl::StrCat("has ", k.heads, " heads and v has ", v.heads));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Problem> ParseProblem(const std::string& json) {
  Json root;
  const auto parsed = google::protobuf::util::JsonStringToMessage(json, &root);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("not JSON: ", std::string(parsed.message())));
  }
  if (root.kind_case() != Json::kStructValue) {
    return absl::InvalidArgumentError("the problem is not a JSON object with q, k and v");
  }
  Problem problem;
  Matrix q, k, v;
  for (const auto& [key, value] : root.struct_value().fields()) {
    Matrix* matrix = key == "q" ? &q : (key == "k" ? &k : (key == "v" ? &v : nullptr));
    absl::Status status =
        matrix != nullptr ? Assign(ParseMatrix(value, key), matrix) : SetOption(key, value, &problem.request);
    if (!status.ok()) return status;
  }
  for (const auto& [name, matrix] : {std::pair("q", &q), std::pair("k", &k), std::pair("v", &v)}) {
    if (matrix->rows == 0) return absl::InvalidArgumentError(absl::StrCat("'", name, "' is missing"));
  }
  absl::Status agreement = CheckAgreement(q, k, v);
  if (!agreement.ok()) return agreement;
  client::AttendRequest& request = problem.request;
  request.num_queries = q.rows;
  request.num_keys = k.rows;
  request.num_q_heads = q.heads;
  request.num_kv_heads = k.heads;
  request.head_dim = q.columns;
  request.value_dim = v.columns;
  problem.with_heads = q.with_heads;
  problem.q = std::move(q.values);
  problem.k = std::move(k.values);
  problem.v = std::move(v.values);
  return problem;
}

}  // namespace attnd::attnctl

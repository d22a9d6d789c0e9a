#include <charconv>
#include <cmath>
#include <span>

#include "absl/strings/str_cat.h"
#include "client/attnctl/problem.h"

namespace attnd::attnctl {
namespace {

void AppendNumber(float number, std::string* json) {
  if (!std::isfinite(number)) {
    *json += std::isnan(number) ? "\"nan\"" : (number > 0 ? "\"inf\"" : "\"-inf\"");
    return;
  }
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), number);
  json->append(text, end.ptr);
}

// Values nested by `shape`, the outermost dimension first.
void AppendNested(std::span<const float> values, std::span<const int64_t> shape, std::string* json) {
  if (shape.empty()) {
    AppendNumber(values[0], json);
    return;
  }
  *json += '[';
  const size_t stride = shape[0] == 0 ? 0 : values.size() / static_cast<size_t>(shape[0]);
  for (int64_t i = 0; i < shape[0]; ++i) {
    if (i > 0) *json += ',';
    AppendNested(values.subspan(static_cast<size_t>(i) * stride, stride), shape.subspan(1), json);
  }
  *json += ']';
}

}  // namespace

client::AttendRequest Problem::Request() const {
  client::AttendRequest whole = request;
  whole.q = q;
  whole.k = k;
  whole.v = v;
  return whole;
}

std::string FormatAnswer(const Problem& problem, const client::AttendResult& result) {
  const client::AttendRequest& r = problem.request;
  std::vector<int64_t> out_shape = {r.num_queries, r.num_q_heads, r.value_dim};
  std::vector<int64_t> weights_shape = {r.num_q_heads, r.num_queries, r.num_keys};
  std::vector<int64_t> lse_shape = {r.num_queries, r.num_q_heads};
  if (!problem.with_heads) {  // one head, which the problem did not write
    out_shape = {r.num_queries, r.value_dim};
    weights_shape = {r.num_queries, r.num_keys};
    lse_shape = {r.num_queries};
  }
  std::string json = "{\"out\":";
  AppendNested(result.out.ToFloats(), out_shape, &json);
  if (!result.weights.empty()) {
    json += ",\"weights\":";
    AppendNested(result.weights, weights_shape, &json);
  }
  if (!result.lse.empty()) {
    json += ",\"lse\":";
    AppendNested(result.lse, lse_shape, &json);
  }
  return json + "}";
}

}  // namespace attnd::attnctl

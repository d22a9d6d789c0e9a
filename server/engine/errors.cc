#include "server/engine/errors.h"

#include <optional>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

constexpr absl::string_view kPayloadUrl = "attnd/error-details";

// The payload is a list of strings, each as its length, a colon and its bytes: reason, delay in nanoseconds, then keys
// and values in turn.
void Append(absl::string_view field, std::string* out) { absl::StrAppend(out, field.size(), ":", field); }

std::optional<absl::string_view> Next(absl::string_view* in) {
  const size_t colon = in->find(':');
  size_t size = 0;
  if (colon == absl::string_view::npos || !absl::SimpleAtoi(in->substr(0, colon), &size)) return std::nullopt;
  const absl::string_view field = in->substr(colon + 1, size);
  in->remove_prefix(colon + 1 + field.size());
  return field;
}

}  // namespace

absl::Status MakeError(absl::StatusCode code, absl::string_view reason, absl::string_view message,
                       std::initializer_list<std::pair<const std::string, std::string>> metadata,
                       absl::Duration retry_delay) {
  absl::Status status(code, message);
  std::string payload;
  Append(reason, &payload);
  Append(absl::StrCat(absl::ToInt64Nanoseconds(retry_delay)), &payload);
  for (const auto& [key, value] : metadata) {
    Append(key, &payload);
    Append(value, &payload);
  }
  status.SetPayload(kPayloadUrl, absl::Cord(payload));
  return status;
}

ErrorDetails GetErrorDetails(const absl::Status& status) {
  ErrorDetails details;
  const auto cord = status.GetPayload(kPayloadUrl);
  if (!cord.has_value()) return details;
  const std::string payload(*cord);
  absl::string_view rest = payload;
  details.reason = std::string(Next(&rest).value_or(""));
  int64_t delay_ns = 0;
  if (absl::SimpleAtoi(Next(&rest).value_or("0"), &delay_ns)) details.retry_delay = absl::Nanoseconds(delay_ns);
  while (!rest.empty()) {
    const auto key = Next(&rest);
    const auto value = Next(&rest);
    if (!key || !value) break;
    details.metadata[std::string(*key)] = std::string(*value);
  }
  return details;
}

}  // namespace attnd

#include "client/attnload/json.h"

#include <cmath>

#include "absl/strings/str_format.h"

namespace attnd::attnload {

void JsonWriter::Separate() {
  if (!first_) text_ += ',';
  first_ = false;
}

JsonWriter& JsonWriter::Open(char bracket) {
  Separate();
  text_ += bracket;
  first_ = true;
  return *this;
}

JsonWriter& JsonWriter::Close(char bracket) {
  text_ += bracket;
  first_ = false;
  return *this;
}

JsonWriter& JsonWriter::Raw(absl::string_view text) {
  Separate();
  text_.append(text.data(), text.size());
  return *this;
}

JsonWriter& JsonWriter::Key(absl::string_view key) {
  Value(key);
  text_ += ':';
  first_ = true;
  return *this;
}

JsonWriter& JsonWriter::Value(double number) {
  return std::isfinite(number) ? Raw(absl::StrFormat("%.9g", number)) : Raw("null");
}

JsonWriter& JsonWriter::Value(absl::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    // '<' too, so that no text can end the script element that the report's data stands in.
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == '<') {
      quoted += absl::StrFormat("\\u%04x", static_cast<unsigned char>(c));
    } else {
      quoted += c;
    }
  }
  return Raw(quoted + '"');
}

}  // namespace attnd::attnload

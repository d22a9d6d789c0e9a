// Writes JSON: one value after another, commas and quotes put in.
#ifndef ATTND_CLIENT_ATTNLOAD_JSON_H_
#define ATTND_CLIENT_ATTNLOAD_JSON_H_

#include <cstdint>
#include <string>
#include <type_traits>

#include "absl/strings/string_view.h"

namespace attnd::attnload {

// Begin and End have to match, and in an object each value needs its Key; nothing checks that.
class JsonWriter {
 public:
  JsonWriter& BeginObject() { return Open('{'); }
  JsonWriter& EndObject() { return Close('}'); }
  JsonWriter& BeginArray() { return Open('['); }
  JsonWriter& EndArray() { return Close(']'); }
  JsonWriter& Key(absl::string_view key);

  // A number that is not finite, for which JSON has no way, becomes null.
  JsonWriter& Value(double number);
  JsonWriter& Value(absl::string_view text);
  JsonWriter& Value(const std::string& text) { return Value(absl::string_view(text)); }
  JsonWriter& Value(const char* text) { return Value(absl::string_view(text)); }
  template <class T>
    requires std::is_integral_v<T>
  JsonWriter& Value(T number) {
    if constexpr (std::is_same_v<T, bool>) return Raw(number ? "true" : "false");
    return Raw(std::to_string(number));
  }

  template <class T>
  JsonWriter& Field(absl::string_view key, const T& value) {
    return Key(key).Value(value);
  }

  const std::string& text() const { return text_; }

 private:
  JsonWriter& Open(char bracket);
  JsonWriter& Close(char bracket);
  JsonWriter& Raw(absl::string_view text);
  void Separate();

  std::string text_;
  bool first_ = true;  // of its object or array
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_JSON_H_

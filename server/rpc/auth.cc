#include "server/rpc/auth.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "server/engine/errors.h"

namespace attnd {
namespace {

constexpr size_t kMinTokenLength = 16;

absl::Status Unauthenticated(absl::string_view reason, absl::string_view message) {
  return MakeError(absl::StatusCode::kUnauthenticated, reason, message);
}

// Looks at every character whatever the first difference; only a length shows.
bool EqualInConstantTime(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = static_cast<unsigned char>(difference | static_cast<unsigned char>(a[i] ^ b[i]));
  }
  return difference == 0;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const TokenTable>> TokenTable::FromText(absl::string_view text) {
  auto table = std::make_shared<TokenTable>();
  int line_number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++line_number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line.front() == '#') continue;
    if (line.size() < kMinTokenLength || !std::all_of(line.begin(), line.end(), absl::ascii_isgraph)) {
      return absl::InvalidArgumentError(absl::StrCat("line ", line_number, " is not a token: ", kMinTokenLength,
                                                     " or more printable characters without spaces are needed"));
    }
    table->tokens_.emplace_back(line);
  }
  if (table->tokens_.empty()) return absl::InvalidArgumentError("it holds no token");
  return std::shared_ptr<const TokenTable>(std::move(table));
}

absl::StatusOr<std::shared_ptr<const TokenTable>> TokenTable::FromFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read ", path));
  absl::StatusOr<std::shared_ptr<const TokenTable>> table = FromText(text.str());
  if (!table.ok()) return absl::InvalidArgumentError(absl::StrCat(path, ": ", table.status().message()));
  return table;
}

absl::Status TokenTable::Check(absl::string_view header) const {
  if (header.empty()) return Unauthenticated("TOKEN_MISSING", "no `authorization: Bearer TOKEN` was sent");
  constexpr absl::string_view kScheme = "Bearer ";
  if (!absl::StartsWithIgnoreCase(header, kScheme)) {
    return Unauthenticated("TOKEN_MISSING", "`authorization` is not of the form `Bearer TOKEN`");
  }
  const absl::string_view token = header.substr(kScheme.size());
  bool known = false;
  for (const std::string& candidate : tokens_) known |= EqualInConstantTime(candidate, token);
  return known ? absl::OkStatus() : Unauthenticated("TOKEN_UNKNOWN", "the token is not one of this server's");
}

}  // namespace attnd

// attnctl session list | get | fork | close | export | import.
#include <algorithm>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/attnctl/commands.h"
#include "client/attnctl/connection.h"
#include "client/attnctl/transfer_command.h"

namespace attnd::attnctl {
namespace {

constexpr char kSynopsis[] =
    "attnctl session list | get ID... | fork ID | close ID... | export ID --output=FILE | import FILE [FLAG...]";
constexpr char kSummary[] =
    "Lists the open sessions in the order of their creation, shows some, forks one (a new session with the same "
    "tokens,\n"
    "or the first ones; its id is printed), or closes some (closing a session that is closed already is no error).\n"
    "Contents of a session are never shown.\n"
    "\n"
    "export writes one to FILE, which has its name only once it is complete; import makes a new session from such a\n"
    "file, of this server or of another, and prints its id. - is standard output or input:\n"
    "  attnctl session export ID --output=- --server=A | attnctl session import - --server=B";

int List(const Client& client, int64_t limit) {
  std::string token;
  int64_t shown = 0;
  do {
    absl::StatusOr<client::SessionPage> page = client.ListSessions(/*page_size=*/1000, token);
    if (!page.ok()) return PrintError(page.status(), client.options().target);
    if (token.empty()) {
      absl::PrintF("%-34s %8s %12s %12s %-6s %-22s %s\n", "SESSION", "TOKENS", "USED", "RESERVED", "KV", "SHAPE",
                   "IDLE");
    }
    for (const client::SessionInfo& s : page->sessions) {
      if (shown++ == limit) {
        std::cerr << "attnctl: there are more; --limit=" << limit << " ends the list here\n";
        return kDone;
      }
      const client::SessionConfig& c = s.config;
      absl::PrintF("%-34s %8d %12s %12s %-6s %-22s %s\n", s.session_id, s.length,
                   HumanBytes(static_cast<double>(s.used_bytes)), HumanBytes(static_cast<double>(s.reserved_bytes)),
                   client::Name(c.kv_dtype),
                   absl::StrFormat("%dx%d/%dx%d", c.num_layers, c.num_q_heads, c.num_kv_heads, c.head_dim),
                   absl::FormatDuration(absl::Trunc(s.idle_time, absl::Milliseconds(1))));
    }
    token = page->next_page_token;
  } while (!token.empty());
  return kDone;
}

void PrintSession(const client::SessionInfo& s) {
  const client::SessionConfig& c = s.config;
  absl::PrintF("session       %s\n", s.session_id);
  absl::PrintF("shape         %d layers, %d/%d heads, head_dim %d, value_dim %d, KV in %s\n", c.num_layers,
               c.num_q_heads, c.num_kv_heads, c.head_dim, c.value_dim_or_default(), client::Name(c.kv_dtype));
  absl::PrintF("tokens        %d (layers: %s)\n", s.length, absl::StrJoin(s.layer_lengths, " "));
  if (std::any_of(s.layer_first_tokens.begin(), s.layer_first_tokens.end(), [](int64_t first) { return first > 0; })) {
    absl::PrintF("held from     %s (before that the layers' windows have passed)\n",
                 absl::StrJoin(s.layer_first_tokens, " "));
  }
  absl::PrintF("used          %s\nreserved      %s\n", HumanBytes(static_cast<double>(s.used_bytes)),
               HumanBytes(static_cast<double>(s.reserved_bytes)));
  if (s.spilled_bytes > 0) {
    absl::PrintF("on disk       %s (its next step brings it back)\n", HumanBytes(static_cast<double>(s.spilled_bytes)));
  }
  absl::PrintF("created       %s\n", absl::FormatTime(absl::RFC3339_sec, s.create_time, absl::UTCTimeZone()));
  absl::PrintF("idle          %s, expires in %s\n", absl::FormatDuration(s.idle_time),
               absl::FormatDuration(s.time_to_live));
}

int GetOrClose(const Client& client, const std::string& verb, const std::vector<std::string>& ids) {
  int exit = kDone;
  for (const std::string& id : ids) {
    if (verb == "get") {
      absl::StatusOr<client::SessionInfo> info = client.GetSession(id);
      if (!info.ok()) {
        exit = PrintError(info.status(), client.options().target);
        continue;
      }
      PrintSession(*info);
    } else {
      absl::StatusOr<bool> was_open = client.CloseSession(id);
      if (!was_open.ok()) {
        exit = PrintError(was_open.status(), client.options().target);
        continue;
      }
      absl::PrintF("%s %s\n", id, *was_open ? "closed" : "was closed before");
    }
  }
  return exit;
}

int Fork(const Client& client, const std::string& id, int64_t length) {
  const absl::StatusOr<client::Session> child =
      client.ForkSession(id, length < 0 ? std::nullopt : std::optional<int64_t>(length));
  if (!child.ok()) return PrintError(child.status(), client.options().target);
  absl::PrintF("%s\n", child->id());
  return kDone;
}

}  // namespace

int RunSession(const Arguments& arguments) {
  FlagSet flags(kSynopsis, kSummary);
  tool::ConnectionFlags connection(&flags);
  int64_t limit = 1000;
  flags.Int("limit", &limit, 1, 1'000'000'000, "list: at most this many sessions");
  int64_t length = -1;
  flags.Int("length", &length, -1, int64_t{1} << 30, "fork: at this many tokens; -1: all");
  std::string output;
  flags.String("output", &output, "export: the file to write, or - for standard output");
  std::vector<std::string> words;
  if (auto exit = ParseOrExit(&flags, arguments, &words)) return *exit;
  const std::string verb = words.empty() ? "" : words[0];
  const bool transfers = verb == "export" || verb == "import";
  if (verb != "list" && verb != "get" && verb != "fork" && verb != "close" && !transfers) {
    std::cerr << "attnctl: session " << (verb.empty() ? "needs a verb" : "has no verb '" + verb + "'")
              << ": list, get, fork, close, export or import\n";
    return kUsage;
  }
  if (transfers && (words.size() != 2 || (verb == "export") == output.empty())) {
    std::cerr << "attnctl: session " << verb
              << (verb == "export" ? " takes one session id and --output=FILE" : " takes one FILE and no --output")
              << "\n";
    return kUsage;
  }
  if ((verb == "list") != (words.size() == 1)) {
    std::cerr << "attnctl: session " << verb
              << (verb == "list" ? " takes no '" + words[1] + "'" : " needs at least one session id") << "\n";
    return kUsage;
  }
  if (verb == "fork" && words.size() != 2) {
    std::cerr << "attnctl: session fork takes one session id, got " << words.size() - 1 << "\n";
    return 2;
  }
  absl::StatusOr<Client> client = Connect(connection);
  if (!client.ok()) return PrintError(client.status());
  if (verb == "list") return List(*client, limit);
  if (verb == "export") return ExportSession(*client, words[1], output);
  if (verb == "import") return ImportSession(*client, words[1]);
  if (verb == "fork") return Fork(*client, words[1], length);
  return GetOrClose(*client, verb, {words.begin() + 1, words.end()});
}

}  // namespace attnd::attnctl

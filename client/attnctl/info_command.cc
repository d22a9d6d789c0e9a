// attnctl info.
#include <cstdio>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "client/attnctl/commands.h"
#include "client/attnctl/connection.h"

namespace attnd::attnctl {
namespace {

void Line(const char* name, const std::string& value) { absl::PrintF("%-20s %s\n", name, value); }

void PrintCapacity(const client::ServerInfo& info) {
  const double capacity = static_cast<double>(info.kv_cache_capacity_bytes);
  const double share = capacity > 0 ? 100.0 / capacity : 0;
  Line("cache capacity", HumanBytes(capacity));
  Line("cache reserved", absl::StrFormat("%s (%.1f%%)", HumanBytes(static_cast<double>(info.kv_cache_reserved_bytes)),
                                         static_cast<double>(info.kv_cache_reserved_bytes) * share));
  Line("cache used", absl::StrFormat("%s (%.1f%%)", HumanBytes(static_cast<double>(info.kv_cache_used_bytes)),
                                     static_cast<double>(info.kv_cache_used_bytes) * share));
}

void Print(const client::ServerInfo& info) {
  Line("version", info.version + (info.draining ? " (draining)" : ""));
  Line("instruction set", info.isa);
  Line("oneDNN", info.onednn_version);
  for (const auto& [dtype, path] : info.kernel_paths) {
    Line(("kernels " + absl::AsciiStrToLower(absl::StripPrefix(dtype, "KV_DTYPE_"))).c_str(), path);
  }
  Line("compute threads", absl::StrFormat("%d", info.compute_threads));
  Line("sessions", absl::StrFormat("%d of %d", info.sessions_active, info.max_sessions));
  Line("session idle ttl", absl::FormatDuration(info.session_idle_ttl));
  Line("largest message", HumanBytes(static_cast<double>(info.max_message_bytes)));
  Line("queue limit", absl::StrFormat("%d tokens", info.max_queue_tokens));
  Line("block", absl::StrFormat("%d tokens", info.block_tokens));
  PrintCapacity(info);
}

void PrintFit(const client::ServerInfo& info, const std::string& model) {
  Line("for the model", model);
  Line("  bytes per token", HumanBytes(static_cast<double>(info.bytes_per_token)));
  Line("  tokens in all", absl::StrFormat("%d (one session in an empty cache)", info.tokens_capacity));
  Line("  tokens now", absl::StrFormat("%d (one more session)", info.tokens_available));
}

}  // namespace

int RunInfo(const Arguments& arguments) {
  FlagSet flags(
      "attnctl info [FLAG...]",
      "Prints the server's version, instruction set, limits and how full its cache is; with --model, also how\n"
      "many tokens of that model fit.");
  tool::ConnectionFlags connection(&flags);
  ModelFlags model(&flags, /*default_model=*/"none");
  if (auto exit = ParseOrExit(&flags, arguments)) return *exit;
  absl::StatusOr<client::SessionConfig> config = client::SessionConfig();
  if (model.given()) {
    config = model.Config();
    if (!config.ok()) return PrintUsageError(config.status());
  }
  absl::StatusOr<Client> client = Connect(connection);
  if (!client.ok()) return PrintError(client.status());
  absl::StatusOr<client::ServerInfo> info = client->GetServerInfo(model.given() ? &*config : nullptr);
  if (!info.ok()) return PrintError(info.status(), connection.server());
  Print(*info);
  if (model.given()) PrintFit(*info, model.Describe());
  return kDone;
}

}  // namespace attnd::attnctl

// attnctl demo.
#include <algorithm>
#include <iostream>
#include <string>
#include <thread>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/attnctl/commands.h"
#include "client/attnctl/connection.h"
#include "client/attnctl/demo.h"

namespace attnd::attnctl {
namespace {

constexpr char kSummary[] =
    "Runs several sessions at once against a server: a prefill and then token by token through all layers, with\n"
    "pseudo-random Q, K and V. Every output row is compared with attention computed here in float64, after the clock\n"
    "of its round has stopped. Exit status 0 only when every step was answered and every row was within the bound of\n"
    "its KV dtype.";

struct Flags {
  explicit Flags(FlagSet* flags) : connection(flags) {
    flags->Int("sessions", &sessions, 1, 4096, "concurrent sessions");
    flags->Int("layers", &layers, 1, 1024, "layers of each");
    flags->Int("q_heads", &q_heads, 1, 1024, "query heads");
    flags->Int("kv_heads", &kv_heads, 1, 1024, "key and value heads");
    flags->Int("head_dim", &head_dim, 1, 256, "dimension of Q, K and V");
    flags->Int("value_dim", &value_dim, 0, 256, "dimension of V; 0: as head_dim");
    flags->Int("prefill", &prefill, 1, 1 << 24, "tokens of the prefill");
    flags->Int("decode", &decode, 0, 1 << 24, "tokens after it, one by one");
    flags->Choice("kv", &kv, {"f32", "bf16", "f16", "int8"}, "how the server stores K and V");
    flags->Int("seed", &seed, 0, int64_t{1} << 62, "of the pseudo-random tensors");
    flags->Switch("stream", &stream, "StepStream instead of unary Steps");
    flags->String("metrics", &metrics, "HOST:PORT or URL of the metrics page, to print its cache gauges as well");
  }

  tool::ConnectionFlags connection;
  int64_t sessions = 8, layers = 4, q_heads = 32, kv_heads = 8, head_dim = 128, value_dim = 0;
  int64_t prefill = 512, decode = 64, seed = 1;
  std::string kv = "f32", metrics;
  bool stream = false;
};

DemoOptions ToOptions(const Flags& flags, int64_t max_message_bytes) {
  DemoOptions options;
  options.sessions = flags.sessions;
  options.prefill = flags.prefill;
  options.decode = flags.decode;
  options.stream = flags.stream;
  options.seed = static_cast<uint64_t>(flags.seed);
  client::SessionConfig& config = options.config;
  config.num_layers = static_cast<int>(flags.layers);
  config.num_q_heads = static_cast<int>(flags.q_heads);
  config.num_kv_heads = static_cast<int>(flags.kv_heads);
  config.head_dim = static_cast<int>(flags.head_dim);
  config.value_dim = static_cast<int>(flags.value_dim);
  config.kv_dtype = *client::ParseKvDType(flags.kv);
  // Half of the limit at most: a request or an answer must fit, and 8 sessions hold theirs at once.
  const int64_t widest = std::max<int64_t>(config.head_dim, config.value_dim_or_default());
  const int64_t token_bytes = 4 * widest * (config.num_q_heads + 2 * config.num_kv_heads);
  options.prefill_chunk = std::clamp<int64_t>(max_message_bytes / 2 / token_bytes, 1, flags.prefill);
  return options;
}

std::string Percentile(std::vector<absl::Duration> samples, double share) {
  if (samples.empty()) return "-";
  const size_t rank = std::min(samples.size() - 1, static_cast<size_t>(share * static_cast<double>(samples.size())));
  std::nth_element(samples.begin(), samples.begin() + static_cast<std::ptrdiff_t>(rank), samples.end());
  return absl::StrFormat("%.3f ms", absl::ToDoubleMilliseconds(samples[rank]));
}

void PrintPhase(const char* name, const PhaseResult& phase) {
  if (phase.tokens == 0) return;
  absl::PrintF("%-8s %8d tokens in %7.3f s  %10.0f tokens/s   step p50 %s, p99 %s (%d steps)\n", name, phase.tokens,
               absl::ToDoubleSeconds(phase.time), static_cast<double>(phase.tokens) / absl::ToDoubleSeconds(phase.time),
               Percentile(phase.latencies, 0.5), Percentile(phase.latencies, 0.99), phase.latencies.size());
}

absl::Status PrintGauges(const Client& client, const char* when, const std::string& metrics) {
  absl::StatusOr<client::ServerInfo> info = client.GetServerInfo();
  if (!info.ok()) return info.status();
  absl::PrintF("cache    %s: %d sessions, used %s, reserved %s, capacity %s\n", when, info->sessions_active,
               HumanBytes(static_cast<double>(info->kv_cache_used_bytes)),
               HumanBytes(static_cast<double>(info->kv_cache_reserved_bytes)),
               HumanBytes(static_cast<double>(info->kv_cache_capacity_bytes)));
  if (metrics.empty()) return absl::OkStatus();
  absl::StatusOr<std::string> page = FetchPage(tool::MetricsUrl(metrics), absl::Seconds(5));
  if (!page.ok()) return page.status();
  for (const std::string& line : SelectSamples(
           *page, {"attnd_sessions_active", "attnd_kv_cache_capacity", "attnd_kv_cache_reserved", "attnd_kv_cache_used",
                   "attnd_kv_cache_shared", "attnd_kv_cache_spilled", "attnd_kv_cache_tokens"})) {
    absl::PrintF("         %s\n", line);
  }
  return absl::OkStatus();
}

// Says what the check found; false when the demo must fail for it.
bool PrintCheck(const Demo& demo) {
  const CheckResult& check = demo.check();
  const bool complete = check.rows == demo.expected_rows();
  const bool right = check.max_error <= demo.error_bound();
  absl::PrintF("checked  %d of %d output rows against float64 in %.1f s (outside the times above)\n", check.rows,
               demo.expected_rows(), absl::ToDoubleSeconds(demo.check_time()));
  absl::PrintF("         largest relative error %.2e, bound %.0e: %s\n", check.max_error, demo.error_bound(),
               right ? "ok" : "WRONG, at " + check.worst);
  return complete && right;
}

// The part that needs the sessions. They are closed on every way out.
absl::StatusOr<bool> RunAll(const Client& client, const DemoOptions& options, const std::string& metrics) {
  Demo demo(client, options);
  absl::Status status = demo.OpenSessions();
  if (!status.ok()) return status;
  {
    ProgressBar bar(demo.total_work());
    status = demo.Run(&bar);
  }
  if (!status.ok()) return status;
  PrintPhase("prefill", demo.prefill());
  PrintPhase("decode", demo.decode());
  if (demo.waits() > 0)
    absl::PrintF("         %d steps were sent again after waiting for a full queue\n", demo.waits());
  const bool right = PrintCheck(demo);
  for (const absl::Status& next : {PrintGauges(client, "with the sessions open", metrics), demo.CloseSessions(),
                                   PrintGauges(client, "after closing them", {})}) {
    if (!next.ok()) return next;
  }
  return right;
}

}  // namespace

int RunDemo(const Arguments& arguments) {
  FlagSet flag_set("attnctl demo [FLAG...]", kSummary);
  Flags flags(&flag_set);
  if (auto exit = ParseOrExit(&flag_set, arguments)) return *exit;
  if (flags.q_heads % flags.kv_heads != 0) {
    return PrintUsageError(absl::InvalidArgumentError(
        absl::StrFormat("--q_heads: %d is not a multiple of --kv_heads %d", flags.q_heads, flags.kv_heads)));
  }
  absl::StatusOr<Client> client = Connect(flags.connection);
  if (!client.ok()) return PrintError(client.status());
  absl::StatusOr<client::ServerInfo> info = client->GetServerInfo();
  if (!info.ok()) return PrintError(info.status(), flags.connection.server());
  const DemoOptions options = ToOptions(flags, std::min(info->max_message_bytes, client->options().max_message_bytes));
  absl::PrintF("server   %s: attnd %s, %s, oneDNN %s, %d compute threads\n", flags.connection.server(), info->version,
               info->isa, info->onednn_version, info->compute_threads);
  absl::PrintF(
      "demo     %d concurrent sessions x %d layers, %d/%d heads, head_dim %d, KV in %s, prefill %d, decode %d%s\n",
      flags.sessions, flags.layers, flags.q_heads, flags.kv_heads, flags.head_dim, flags.kv, flags.prefill,
      flags.decode, flags.stream ? ", streamed" : "");
  absl::StatusOr<bool> right = RunAll(*client, options, flags.metrics);
  if (!right.ok()) return PrintError(right.status(), flags.connection.server());
  if (!*right) std::cerr << "attnctl: the demo FAILED: not every answer was checked and right\n";
  return *right ? kDone : kFailed;
}

}  // namespace attnd::attnctl

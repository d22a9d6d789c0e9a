#include "server/server.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/cpu_paths.h"
#include "server/engine/engine.h"
#include "server/grpc_server.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/metrics_server.h"
#include "server/rpc/attention_service.h"
#include "server/rpc/auth.h"
#include "server/version.h"

namespace attnd {
namespace {

// How often a drain looks whether it is to hurry.
constexpr absl::Duration kHurryPeriod = absl::Milliseconds(50);
// How long new calls are refused by name before the transport stops: what reaches it then ends as a bare CANCELLED,
// which clients do not take for a server that goes away.
constexpr absl::Duration kRefusalPeriod = absl::Milliseconds(250);
// For answers that are on their way and for calls that never end by themselves (health watches).
constexpr absl::Duration kShutdownGrace = absl::Milliseconds(200);
constexpr absl::Duration kHurriedGrace = absl::Milliseconds(20);

EngineOptions MakeEngineOptions(const Options& options) {
  EngineOptions engine;
  engine.kv_cache_bytes = options.kv_cache_bytes;
  engine.compute_threads = options.compute_threads;
  engine.max_sessions = options.max_sessions;
  engine.session_idle_ttl = options.session_idle_ttl;
  engine.evict_lru = options.eviction == "lru";
  engine.spill_dir = options.spill_dir;
  engine.max_queue_tokens = options.max_queue_tokens;
  engine.max_queue_requests = options.max_queue_requests;
  engine.max_queue_delay = options.max_queue_delay;
  engine.prefill_chunk_tokens = options.prefill_chunk_tokens;
  engine.prefill_chunk_time = options.prefill_chunk_time;
  engine.poison_cache = options.poison_cache;
  engine.compute_hook = options.compute_hook;
  return engine;
}

absl::StatusOr<RpcOptions> MakeRpcOptions(const Options& options) {
  RpcOptions rpc;
  rpc.version = kVersion;
  rpc.isa = IsaName();
  rpc.onednn_version = OneDnnVersion();
  rpc.kernel_paths = {{"KV_DTYPE_F32", KernelPath(KvDType::kF32)},
                      {"KV_DTYPE_BF16", KernelPath(KvDType::kBf16)},
                      {"KV_DTYPE_F16", KernelPath(KvDType::kF16)},
                      {"KV_DTYPE_INT8", KernelPath(KvDType::kInt8)}};
  rpc.max_message_bytes = options.max_message_bytes;
  rpc.max_inflight_bytes = options.max_inflight_bytes;
  rpc.max_streams = options.max_streams;
  if (options.auth_tokens_file.empty()) return rpc;
  auto tokens = TokenTable::FromFile(options.auth_tokens_file);
  if (!tokens.ok()) {
    return absl::Status(tokens.status().code(), absl::StrCat(tokens.status().message(), " (--auth_tokens_file)"));
  }
  rpc.tokens = *std::move(tokens);
  return rpc;
}

bool IsLoopback(absl::string_view address) {
  return absl::StartsWith(address, "127.") || absl::StartsWith(address, "localhost:") ||
         absl::StartsWith(address, "[::1]:") || absl::StartsWith(address, "unix:");
}

void WarnOfExposure(const Options& options) {
  if (IsLoopback(options.listen) || !options.tls_cert.empty()) return;
  Log(LogLevel::kWarning,
      options.auth_tokens_file.empty()
          ? "listening beyond loopback without TLS: anyone who reaches the port can use the service"
          : "listening beyond loopback without TLS: tokens and tensors can be read on the way",
      {{"listen", options.listen}});
}

void LogSessions(absl::string_view event, const std::string& directory, const SavedSessions& sessions) {
  Log(sessions.lost > 0 ? LogLevel::kError : LogLevel::kInfo, event,
      {{"directory", directory},
       {"sessions", absl::StrCat(sessions.saved)},
       {"lost", absl::StrCat(sessions.lost)},
       {"first_error", sessions.first_error}});
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Options& given) {
  absl::StatusOr<Options> options = ResolveOptions(given);
  if (!options.ok()) return options.status();
  absl::StatusOr<RpcOptions> rpc_options = MakeRpcOptions(*options);
  if (!rpc_options.ok()) return rpc_options.status();
  // A machine whose products are wrong never gets as far as listening.
  if (std::string what; !SelfTest(&what)) {
    return absl::InternalError(absl::StrCat("this machine computes wrong products, nothing is served: ", what));
  }

  std::unique_ptr<Server> server(new Server);
  server->options_ = *options;
  server->metrics_ =
      std::make_unique<Metrics>(BuildInfo{.version = kVersion, .isa = IsaName(), .onednn = OneDnnVersion()});
  absl::StatusOr<std::unique_ptr<Engine>> engine = Engine::Create(MakeEngineOptions(*options), server->metrics_.get());
  if (!engine.ok()) return engine.status();
  server->engine_ = *std::move(engine);
  server->service_ = std::make_unique<AttentionService>(server->engine_.get(), server->metrics_.get(), *rpc_options);
  server->metrics_->SetStatsSource(server->engine_.get(), server->service_.get());

  if (absl::Status status = server->RestoreSessions(); !status.ok()) return status;
  if (!options->metrics_listen.empty()) {
    auto metrics_server = MetricsServer::Start(options->metrics_listen, *server->metrics_, options->compute_threads);
    if (!metrics_server.ok()) return metrics_server.status();
    server->metrics_server_ = *std::move(metrics_server);
  }
  WarnOfExposure(*options);
  auto grpc_server = GrpcServer::Start(*options, server->service_->service(),
                                       [metrics = server->metrics_.get()] { metrics->OnConnectionRefused(); });
  if (!grpc_server.ok()) return grpc_server.status();
  server->grpc_server_ = *std::move(grpc_server);
  server->metrics_->SetReady(true);
  return server;
}

Server::~Server() {
  Hurry();
  if (grpc_server_ != nullptr && !drained_) Drain();
  metrics_server_.reset();
  if (metrics_ != nullptr) metrics_->SetStatsSource(nullptr, nullptr);
}

const std::string& Server::address() const { return grpc_server_->address(); }

std::string Server::metrics_address() const { return metrics_server_ == nullptr ? "" : metrics_server_->address(); }

absl::Status Server::RestoreSessions() {
  // That it cannot be written should not be found out when it is too late.
  if (!options_.snapshot_on_drain.empty()) {
    const absl::Status usable = engine_->PrepareToSave(options_.snapshot_on_drain);
    if (!usable.ok()) return usable;
  }
  // The spill directory holds something only where a process ended without saving it.
  for (const std::string& directory : {options_.restore, options_.spill_dir}) {
    if (directory.empty()) continue;
    const absl::StatusOr<SavedSessions> found = engine_->RestoreSessions(directory);
    if (!found.ok()) return found.status();
    if (found->saved == 0 && found->lost == 0) continue;
    LogSessions("sessions of an earlier process are served again", directory, *found);
  }
  return absl::OkStatus();
}

bool Server::SaveSessions() {
  if (options_.snapshot_on_drain.empty()) return true;
  const absl::StatusOr<SavedSessions> saved =
      engine_->SaveSessions(options_.snapshot_on_drain, [this] { return hurry_.load(std::memory_order_acquire); });
  if (!saved.ok()) {
    Log(LogLevel::kError, "the sessions were not saved", {{"reason", std::string(saved.status().message())}});
    return false;
  }
  LogSessions("sessions saved", options_.snapshot_on_drain, *saved);
  return saved->lost == 0;
}

bool Server::WaitForCalls(absl::Time deadline) {
  while (!hurry_.load(std::memory_order_acquire)) {
    const absl::Time next = std::min(deadline, absl::Now() + kHurryPeriod);
    if (service_->WaitForCalls(next)) return true;
    if (next == deadline) break;
  }
  return service_->WaitForCalls(absl::InfinitePast());
}

void Server::Linger(absl::Time until) {
  while (!hurry_.load(std::memory_order_acquire) && absl::Now() < until) {
    absl::SleepFor(std::min(kHurryPeriod, until - absl::Now()));
  }
}

bool Server::Drain() {
  const absl::Time deadline = absl::Now() + options_.drain_timeout;
  metrics_->SetReady(false);
  metrics_->SetDraining(true);
  grpc_server_->SetServing(false);
  service_->BeginDrain();
  Linger(std::min(deadline, absl::Now() + kRefusalPeriod));
  const bool complete = WaitForCalls(deadline);
  // What is left is answered with UNAVAILABLE, so that every call can end before the server does.
  service_->CutOff();
  engine_->Drain(absl::Now());
  grpc_server_->Shutdown(hurry_.load(std::memory_order_acquire) ? kHurriedGrace : kShutdownGrace);
  drained_ = true;
  return complete;
}

}  // namespace attnd

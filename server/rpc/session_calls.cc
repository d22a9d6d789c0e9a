#include "server/rpc/session_calls.h"

#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/block_layout.h"
#include "server/rpc/convert.h"
#include "server/rpc/validate.h"

namespace attnd {

void CreateSessionCall::Handle() {
  absl::StatusOr<SessionConfig> config = MakeSessionConfig(request().config());
  if (!config.ok()) return FinishWith(config.status());
  engine().CreateSession(*std::move(config), [this](absl::StatusOr<SessionInfo> info) {
    if (info.ok()) ToProto(*info, &response());
    FinishWith(info.status());
  });
}

void RewindSessionCall::Handle() {
  absl::Status status = CheckSessionId(request().session_id());
  if (status.ok() && request().length() < 0) {
    status = InvalidArgument("BAD_POSITION", absl::StrCat("length is ", request().length(), ", but must be >= 0"));
  }
  if (!status.ok()) return FinishWith(status);
  engine().RewindSession(request().session_id(), request().length(), [this](absl::StatusOr<SessionInfo> info) {
    if (info.ok()) ToProto(*info, &response());
    FinishWith(info.status());
  });
}

void ForkSessionCall::Handle() {
  const absl::StatusOr<std::optional<int64_t>> length = CheckFork(request());
  if (!length.ok()) return FinishWith(length.status());
  engine().ForkSession(request().session_id(), *length, [this](absl::StatusOr<SessionInfo> info) {
    if (info.ok()) ToProto(*info, &response());
    FinishWith(info.status());
  });
}

void ReorderSessionsCall::Handle() {
  if (absl::Status status = CheckReorder(request()); !status.ok()) return FinishWith(status);
  engine().ReorderSessions({request().session_ids().begin(), request().session_ids().end()},
                           {request().sources().begin(), request().sources().end()},
                           [this](absl::StatusOr<std::vector<int64_t>> lengths) {
                             if (lengths.ok()) response().mutable_lengths()->Assign(lengths->begin(), lengths->end());
                             FinishWith(lengths.status());
                           });
}

void GetSessionCall::Handle() {
  if (absl::Status status = CheckSessionId(request().session_id()); !status.ok()) return FinishWith(status);
  const absl::StatusOr<SessionInfo> info = engine().GetSession(request().session_id());
  if (info.ok()) ToProto(*info, &response());
  FinishWith(info.status());
}

void ListSessionsCall::Handle() {
  const absl::StatusOr<Page> page = MakePage(request());
  if (!page.ok()) return FinishWith(page.status());
  // One more than the page tells whether another page follows.
  std::vector<SessionInfo> sessions = engine().ListSessions(page->after, page->limit + 1);
  if (static_cast<int>(sessions.size()) > page->limit) {
    sessions.resize(page->limit);
    response().set_next_page_token(absl::StrCat(sessions.back().sequence));
  }
  for (const SessionInfo& info : sessions) ToProto(info, response().add_sessions());
  FinishWith(absl::OkStatus());
}

void CloseSessionCall::Handle() {
  if (absl::Status status = CheckSessionId(request().session_id()); !status.ok()) return FinishWith(status);
  const absl::StatusOr<bool> was_open = engine().CloseSession(request().session_id());
  if (was_open.ok()) response().set_was_open(*was_open);
  FinishWith(was_open.status());
}

void GetServerInfoCall::Handle() {
  v1::ServerInfo& info = response();
  if (request().has_config()) {
    const absl::StatusOr<SessionConfig> config = MakeSessionConfig(request().config());
    if (!config.ok()) return FinishWith(config.status());
    const CapacityEstimate estimate = engine().Estimate(*config);
    info.set_bytes_per_token(estimate.bytes_per_token);
    info.set_tokens_capacity(estimate.tokens_capacity);
    info.set_tokens_available(estimate.tokens_available);
  }
  const EngineOptions& options = engine().options();
  const EngineStats stats = engine().stats();
  info.set_version(state().options.version);
  info.set_isa(state().options.isa);
  info.set_onednn_version(state().options.onednn_version);
  info.mutable_kernel_paths()->insert(state().options.kernel_paths.begin(), state().options.kernel_paths.end());
  info.set_compute_threads(options.compute_threads);
  info.set_block_tokens(kBlockTokens);
  info.set_max_message_bytes(state().options.max_message_bytes);
  info.set_max_queue_tokens(options.max_queue_tokens);
  info.set_max_sessions(options.max_sessions);
  info.set_sessions_active(stats.sessions_active);
  info.set_kv_cache_capacity_bytes(stats.capacity_bytes);
  info.set_kv_cache_reserved_bytes(stats.reserved_bytes);
  info.set_kv_cache_used_bytes(stats.used_bytes);
  *info.mutable_session_idle_ttl() = ToProtoDuration(options.session_idle_ttl);
  info.set_draining(state().admission.draining());
  FinishWith(absl::OkStatus());
}

}  // namespace attnd

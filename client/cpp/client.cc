#include "client/cpp/client.h"

#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "attnd/v1/attnd.pb.h"
#include "client/cpp/internal/convert.h"
#include "client/cpp/internal/health.h"
#include "client/cpp/internal/status.h"
#include "client/cpp/internal/stream.h"
#include "client/cpp/internal/transport.h"

namespace attnd::client {
namespace {

using internal::ExplainLostSession;
using internal::RetrySafe;
using Stub = v1::Attention::Stub;
using AsyncStub = v1::Attention::StubInterface::async_interface;

bool IsLocal(const std::string& target) {
  std::string host = target;
  for (const char* scheme : {"dns:///", "dns:", "ipv4:", "ipv6:"}) {
    if (absl::StartsWith(host, scheme)) host.erase(0, std::string(scheme).size());
  }
  return absl::StartsWith(target, "unix:") || absl::StartsWith(target, "unix-abstract:") ||
         absl::StartsWith(host, "127.") || host == "localhost" || absl::StartsWith(host, "localhost:") ||
         absl::StartsWith(host, "[::1]");
}

absl::Status CheckLimits(const ClientOptions& options) {
  if (options.target.empty()) return absl::InvalidArgumentError("the target is empty");
  if (options.default_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("default_timeout is ", absl::FormatDuration(options.default_timeout), " and must be positive"));
  }
  if (options.max_message_bytes <= 0 || options.max_message_bytes > std::numeric_limits<int>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_message_bytes is ", options.max_message_bytes, " and must be in 1..2^31-1"));
  }
  if (options.retry.max_attempts < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("retry.max_attempts is ", options.retry.max_attempts, " and must be at least 1"));
  }
  return absl::OkStatus();
}

absl::Status CheckSecurity(const ClientOptions& options) {
  const TlsOptions& tls = options.tls;
  if (!tls.enabled && !(tls.root_certificates.empty() && tls.client_certificate.empty() && tls.client_key.empty())) {
    return absl::InvalidArgumentError("certificates are given but tls.enabled is not set");
  }
  if (tls.client_certificate.empty() != tls.client_key.empty()) {
    return absl::InvalidArgumentError("a client certificate and its key must be given together");
  }
  if (!options.bearer_token.empty() && !tls.enabled && !options.allow_token_without_tls && !IsLocal(options.target)) {
    return absl::InvalidArgumentError(absl::StrCat("the bearer token would travel to ", options.target,
                                                   " in the clear: enable TLS, or set allow_token_without_tls"));
  }
  return absl::OkStatus();
}

// A repeated step rewrites the same place only when each segment says which place that is.
RetrySafe StepRetrySafe(const StepRequest& request) {
  for (const Segment& segment : request.segments) {
    if (!segment.start_position.has_value()) return RetrySafe::kNo;
  }
  return RetrySafe::kYes;
}

}  // namespace

absl::StatusOr<Client> Client::Connect(ClientOptions options) {
  for (const absl::Status& status : {CheckLimits(options), CheckSecurity(options)}) {
    if (!status.ok()) return status;
  }
  return Client(std::make_shared<internal::Transport>(std::move(options)));
}

const ClientOptions& Client::options() const { return transport_->options(); }

absl::StatusOr<ServerInfo> Client::GetServerInfo(const SessionConfig* config, const CallOptions& call) const {
  v1::GetServerInfoRequest request;
  v1::ServerInfo response;
  if (config != nullptr) internal::ToWire(*config, request.mutable_config());
  absl::Status status = transport_->Unary(&Stub::GetServerInfo, request, &response, call, RetrySafe::kYes);
  if (!status.ok()) return status;
  return internal::FromWire(response);
}

absl::StatusOr<bool> Client::IsServing(const std::string& service, const CallOptions& call) const {
  bool serving = false;
  absl::Status status = transport_->Call(call, RetrySafe::kYes, [&](grpc::ClientContext* context) {
    return internal::CheckHealth(transport_->channel(), context, service, &serving);
  });
  if (!status.ok()) return status;
  return serving;
}

absl::StatusOr<Session> Client::CreateSession(const SessionConfig& config, const CallOptions& call) const {
  v1::CreateSessionRequest request;
  v1::Session response;
  internal::ToWire(config, request.mutable_config());
  absl::Status status = transport_->Unary(&Stub::CreateSession, request, &response, call, RetrySafe::kNo);
  if (!status.ok()) return status;
  return Opened(internal::FromWire(response));
}

absl::StatusOr<Session> Client::Opened(absl::StatusOr<SessionInfo> info) const {
  if (!info.ok()) return info.status();
  return Session(*this, std::move(info->session_id), std::move(info->config));
}

absl::StatusOr<Session> Client::OpenSession(const std::string& session_id, const CallOptions& call) const {
  return Opened(GetSession(session_id, call));
}

absl::StatusOr<SessionInfo> Client::GetSession(const std::string& session_id, const CallOptions& call) const {
  v1::GetSessionRequest request;
  v1::Session response;
  request.set_session_id(session_id);
  absl::Status status = transport_->Unary(&Stub::GetSession, request, &response, call, RetrySafe::kYes);
  if (!status.ok()) return status;
  return internal::FromWire(response);
}

absl::StatusOr<SessionPage> Client::ListSessions(int page_size, const std::string& page_token,
                                                 const CallOptions& call) const {
  v1::ListSessionsRequest request;
  v1::ListSessionsResponse response;
  request.set_page_size(page_size);
  request.set_page_token(page_token);
  absl::Status status = transport_->Unary(&Stub::ListSessions, request, &response, call, RetrySafe::kYes);
  if (!status.ok()) return status;
  SessionPage page;
  page.next_page_token = response.next_page_token();
  for (const v1::Session& session : response.sessions()) {
    absl::StatusOr<SessionInfo> info = internal::FromWire(session);
    if (!info.ok()) return info.status();
    page.sessions.push_back(*std::move(info));
  }
  return page;
}

absl::StatusOr<bool> Client::CloseSession(const std::string& session_id, const CallOptions& call) const {
  v1::CloseSessionRequest request;
  v1::CloseSessionResponse response;
  request.set_session_id(session_id);
  absl::Status status = transport_->Unary(&Stub::CloseSession, request, &response, call, RetrySafe::kYes);
  if (!status.ok()) return status;
  return response.was_open();
}

absl::StatusOr<SessionInfo> Client::RewindSession(const std::string& session_id, int64_t length,
                                                  const CallOptions& call) const {
  v1::RewindSessionRequest request;
  v1::Session response;
  request.set_session_id(session_id);
  request.set_length(length);
  absl::Status status = transport_->Unary(&Stub::RewindSession, request, &response, call, RetrySafe::kNo);
  if (!status.ok()) return ExplainLostSession(status);
  return internal::FromWire(response);
}

absl::StatusOr<Session> Client::ForkSession(const std::string& session_id, std::optional<int64_t> length,
                                            const CallOptions& call) const {
  v1::ForkSessionRequest request;
  v1::Session response;
  request.set_session_id(session_id);
  if (length.has_value()) request.set_length(*length);
  absl::Status status = transport_->Unary(&Stub::ForkSession, request, &response, call, RetrySafe::kNo);
  if (!status.ok()) return ExplainLostSession(status);
  return Opened(internal::FromWire(response));
}

absl::StatusOr<std::vector<int64_t>> Client::ReorderSessions(const std::vector<std::string>& session_ids,
                                                             const std::vector<int>& sources,
                                                             const CallOptions& call) const {
  v1::ReorderSessionsRequest request;
  v1::ReorderSessionsResponse response;
  request.mutable_session_ids()->Assign(session_ids.begin(), session_ids.end());
  request.mutable_sources()->Assign(sources.begin(), sources.end());
  absl::Status status = transport_->Unary(&Stub::ReorderSessions, request, &response, call, RetrySafe::kNo);
  if (!status.ok()) return ExplainLostSession(status);
  return std::vector<int64_t>(response.lengths().begin(), response.lengths().end());
}

absl::StatusOr<AttendResult> Client::Attend(const AttendRequest& request, const CallOptions& call) const {
  v1::AttendRequest wire;
  v1::AttendResponse response;
  internal::ToWire(request, &wire);
  absl::Status status = transport_->Unary(&Stub::Attend, wire, &response, call, RetrySafe::kYes);
  if (!status.ok()) return status;
  return internal::FromWire(std::move(response));
}

absl::StatusOr<AttendGradients> Client::AttendBackward(const AttendBackwardRequest& request,
                                                       const CallOptions& call) const {
  v1::AttendBackwardRequest wire;
  v1::AttendBackwardResponse response;
  internal::ToWire(request, &wire);
  absl::Status status = transport_->Unary(&Stub::AttendBackward, wire, &response, call, RetrySafe::kYes);
  if (!status.ok()) return status;
  return internal::FromWire(std::move(response));
}

absl::StatusOr<StepResult> Client::Step(const StepRequest& request, const CallOptions& call) const {
  v1::StepRequest wire;
  v1::StepResponse response;
  internal::ToWire(request, &wire);
  absl::Status status = transport_->Unary(&Stub::Step, wire, &response, call, StepRetrySafe(request));
  if (!status.ok()) return ExplainLostSession(status);
  return internal::FromWire(std::move(response));
}

void Client::CreateSessionAsync(const SessionConfig& config, const CallOptions& call,
                                std::function<void(absl::StatusOr<Session>)> done) const {
  v1::CreateSessionRequest request;
  internal::ToWire(config, request.mutable_config());
  transport_->UnaryAsync<v1::CreateSessionRequest, v1::Session>(
      &AsyncStub::CreateSession, std::move(request), call,
      // Weak, and locked for no longer than it takes: see Transport::UnaryAsync.
      [transport = std::weak_ptr(transport_), done = std::move(done)](const absl::Status& status,
                                                                      v1::Session* response) {
        if (!status.ok()) return done(status);
        absl::StatusOr<Session> session = Client(transport.lock()).Opened(internal::FromWire(*response));
        done(std::move(session));
      });
}

void Client::StepAsync(const StepRequest& request, const CallOptions& call,
                       std::function<void(absl::StatusOr<StepResult>)> done) const {
  v1::StepRequest wire;
  internal::ToWire(request, &wire);
  transport_->UnaryAsync<v1::StepRequest, v1::StepResponse>(
      &AsyncStub::Step, std::move(wire), call,
      [done = std::move(done)](const absl::Status& status, v1::StepResponse* response) {
        if (!status.ok()) return done(ExplainLostSession(status));
        done(internal::FromWire(std::move(*response)));
      });
}

void Client::CloseSessionAsync(const std::string& session_id, const CallOptions& call,
                               std::function<void(absl::StatusOr<bool>)> done) const {
  v1::CloseSessionRequest request;
  request.set_session_id(session_id);
  transport_->UnaryAsync<v1::CloseSessionRequest, v1::CloseSessionResponse>(
      &AsyncStub::CloseSession, std::move(request), call,
      [done = std::move(done)](const absl::Status& status, v1::CloseSessionResponse* response) {
        if (!status.ok()) return done(status);
        done(response->was_open());
      });
}

std::unique_ptr<StepStream> Client::OpenStepStream(const StepStreamOptions& options) const {
  return std::unique_ptr<StepStream>(new StepStream(StepStream::Impl::Open(transport_, options)));
}

}  // namespace attnd::client

#include "server/grpc_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/acceptor.h"

namespace attnd {
namespace {

constexpr char kServiceName[] = "attnd.v1.Attention";

// Keepalive. A client may ping as often as every kMinClientPingMs, with or without calls (our clients ping every 10 s;
// gRPC's default of 5 minutes answers such clients with GOAWAY too_many_pings). The server pings a silent client every
// kServerPingMs, so that a connection that is dead without a word is noticed and its streams are freed.
constexpr int kMinClientPingMs = 5'000;
constexpr int kServerPingMs = 30'000;
constexpr int kServerPingTimeoutMs = 10'000;

constexpr int kMaxStreamsPerConnection = 1024;

// Our own calls and the health service's take no thread; a stream of gRPC's reflection service takes one for as long as
// it is open. Beyond these, such a stream is refused, RESOURCE_EXHAUSTED.
constexpr int kMaxBlockingThreads = 32;

// A connection that has not become one of HTTP/2 (and TLS) by then is closed: gRPC's two minutes are a place each for
// those who connect and say nothing.
constexpr int kHandshakeTimeoutMs = 20'000;

absl::StatusOr<std::string> ReadFile(absl::string_view flag, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (file && !text.str().empty()) return text.str();
  return absl::InvalidArgumentError(absl::StrCat("cannot read ", path, " (--", flag, ")"));
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeCredentials(const Options& options) {
  if (options.tls_cert.empty()) return grpc::InsecureServerCredentials();
  const absl::StatusOr<std::string> cert = ReadFile("tls_cert", options.tls_cert);
  if (!cert.ok()) return cert.status();
  const absl::StatusOr<std::string> key = ReadFile("tls_key", options.tls_key);
  if (!key.ok()) return key.status();
  grpc::SslServerCredentialsOptions ssl;
  ssl.pem_key_cert_pairs.push_back({*key, *cert});
  if (!options.tls_client_ca.empty()) {
    absl::StatusOr<std::string> ca = ReadFile("tls_client_ca", options.tls_client_ca);
    if (!ca.ok()) return ca.status();
    ssl.pem_root_certs = *std::move(ca);
    ssl.client_certificate_request = GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
  }
  return grpc::SslServerCredentials(ssl);
}

void SetLimits(const Options& options, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  builder->SetMaxSendMessageSize(static_cast<int>(options.max_message_bytes));
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeTimeoutMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kMinClientPingMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kServerPingMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kServerPingTimeoutMs);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // What gRPC itself may hold of messages that are arriving: as much as those that were taken in. Beyond it gRPC resets
  // streams, which their clients see as RESOURCE_EXHAUSTED, until it holds less. A message alone must always fit.
  grpc::ResourceQuota quota("attnd");
  quota.Resize(static_cast<size_t>(std::max(options.max_inflight_bytes, 2 * options.max_message_bytes)));
  quota.SetMaxThreads(kMaxBlockingThreads);
  builder->SetResourceQuota(quota);
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(const Options& options, grpc::Service* service,
                                                              std::function<void()> on_refused) {
  auto credentials = MakeCredentials(options);
  if (!credentials.ok()) return credentials.status();
  auto acceptor = Acceptor::Listen(options.listen);
  if (!acceptor.ok()) return acceptor.status();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();

  std::unique_ptr<GrpcServer> started(new GrpcServer);
  grpc::ServerBuilder builder;
  SetLimits(options, &builder);
  using Builder = grpc::ServerBuilder::experimental_type;
  started->entrance_ = builder.experimental().AddExternalConnectionAcceptor(Builder::ExternalConnectionType::FROM_FD,
                                                                            *std::move(credentials));
  builder.RegisterService(service);
  started->server_ = builder.BuildAndStart();
  if (started->server_ == nullptr) {
    return absl::InvalidArgumentError(!options.tls_cert.empty()
                                          ? "cannot serve TLS: --tls_cert and --tls_key do not fit each other"
                                          : "gRPC cannot start its server");
  }
  started->acceptor_ = *std::move(acceptor);
  started->SetServing(true);
  const auto serve = [entrance = started->entrance_.get()](int listener, int fd) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.listener_fd = listener;
    connection.fd = fd;
    entrance->HandleNewConnection(&connection);
  };
  started->acceptor_->Start(options.max_connections, serve, std::move(on_refused));
  return started;
}

GrpcServer::~GrpcServer() { Shutdown(absl::ZeroDuration()); }

const std::string& GrpcServer::address() const { return acceptor_->address(); }

void GrpcServer::SetServing(bool serving) {
  grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
  health->SetServingStatus(kServiceName, serving);
  health->SetServingStatus(serving);  // all known names, "" among them
}

void GrpcServer::Shutdown(absl::Duration grace) {
  if (acceptor_ != nullptr) acceptor_->Stop();
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now() + absl::ToChronoNanoseconds(grace));
}

}  // namespace attnd

#include "client/cpp/internal/transport.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/errors.h"
#include "client/cpp/internal/status.h"

namespace attnd::client::internal {
namespace {

grpc::ChannelArguments Arguments(const ClientOptions& options) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(static_cast<int>(options.max_message_bytes));
  arguments.SetMaxSendMessageSize(static_cast<int>(options.max_message_bytes));
  const int keepalive_ms = static_cast<int>(absl::ToInt64Milliseconds(options.keepalive));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, keepalive_ms);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, keepalive_ms);
  // An idle session is a connection without calls for minutes; a dead one should be known before the next step.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // gRPC waits up to two minutes between attempts to reconnect, longer than any retry of ours lasts.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  if (options.own_connection) arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  if (!options.tls.server_name.empty()) arguments.SetSslTargetNameOverride(options.tls.server_name);
  if (!options.user_agent.empty()) arguments.SetUserAgentPrefix(options.user_agent);
  return arguments;
}

std::shared_ptr<grpc::ChannelCredentials> Credentials(const TlsOptions& tls) {
  if (!tls.enabled) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions ssl;
  ssl.pem_root_certs = tls.root_certificates;
  ssl.pem_cert_chain = tls.client_certificate;
  ssl.pem_private_key = tls.client_key;
  return grpc::SslCredentials(ssl);
}

// Returns early when a stop is requested.
void Pause(absl::Duration duration, const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any wake;
  std::unique_lock<std::mutex> lock(mutex);
  wake.wait_for(lock, stop, absl::ToChronoNanoseconds(duration), [] { return false; });
}

absl::Duration Jittered(absl::Duration pause) {
  thread_local absl::BitGen random;
  return pause * absl::Uniform(random, 0.8, 1.2);
}

}  // namespace

Transport::Transport(ClientOptions options)
    : options_(std::move(options)),
      channel_(grpc::CreateCustomChannel(options_.target, Credentials(options_.tls), Arguments(options_))),
      stub_(v1::Attention::NewStub(channel_)) {}

void Transport::Prepare(grpc::ClientContext& context) const {
  if (!options_.bearer_token.empty()) context.AddMetadata("authorization", "Bearer " + options_.bearer_token);
}

absl::Status Transport::CheckSize(const google::protobuf::MessageLite& request) const {
  const int64_t bytes = static_cast<int64_t>(request.ByteSizeLong());
  if (bytes <= options_.max_message_bytes) return absl::OkStatus();
  return ClientError(absl::StatusCode::kResourceExhausted, "MESSAGE_TOO_LARGE",
                     absl::StrCat("the request is ", bytes, " bytes and the client's max_message_bytes is ",
                                  options_.max_message_bytes, ": send fewer tokens at once"));
}

absl::Status Transport::Call(const CallOptions& call, RetrySafe retry_safe,
                             absl::FunctionRef<grpc::Status(grpc::ClientContext*)> attempt) const {
  const absl::Time deadline = absl::Now() + TimeoutOr(call.timeout);
  absl::Duration backoff = options_.retry.initial_backoff;
  for (int attempts = 1;; ++attempts) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    Prepare(context);
    absl::Status status;
    {
      std::stop_callback cancel(call.stop, [&context] { context.TryCancel(); });
      status = FromGrpc(attempt(&context));
    }
    const bool again = retry_safe == RetrySafe::kYes && absl::IsUnavailable(status) &&
                       attempts < options_.retry.max_attempts && !call.stop.stop_requested();
    if (!again) return status;
    const absl::Duration asked = GetErrorDetails(status).retry_delay.value_or(absl::ZeroDuration());
    const absl::Duration pause = std::max(Jittered(backoff), asked);
    if (absl::Now() + pause >= deadline) return status;
    Pause(pause, call.stop);
    backoff = std::min(backoff * 2, options_.retry.max_backoff);
  }
}

}  // namespace attnd::client::internal

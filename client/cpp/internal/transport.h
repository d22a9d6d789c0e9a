// The gRPC half of the client: channel, stub, and what every call gets (deadline, token, retries). Not included by
// the public headers.
#ifndef ATTND_CLIENT_CPP_INTERNAL_TRANSPORT_H_
#define ATTND_CLIENT_CPP_INTERNAL_TRANSPORT_H_

#include <google/protobuf/message_lite.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "attnd/v1/attnd.grpc.pb.h"
#include "client/cpp/options.h"

namespace attnd::client::internal {

// Whether repeating a call whose answer was lost is harmless.
enum class RetrySafe : bool { kNo, kYes };

// Thread-safe.
class Transport {
 public:
  explicit Transport(ClientOptions options);

  const ClientOptions& options() const { return options_; }
  v1::Attention::Stub& stub() { return *stub_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }

  // Puts the token into a new context. Deadlines are the caller's.
  void Prepare(grpc::ClientContext& context) const;

  absl::Duration TimeoutOr(absl::Duration timeout) const {
    return timeout > absl::ZeroDuration() ? timeout : options_.default_timeout;
  }

  // RESOURCE_EXHAUSTED with MESSAGE_TOO_LARGE when the request is above max_message_bytes.
  absl::Status CheckSize(const google::protobuf::MessageLite& request) const;

  // Calls `attempt` with a new context each time (a context serves one call only) until it succeeds, fails in a way
  // that a retry does not mend, or the deadline leaves no room for another pause.
  absl::Status Call(const CallOptions& call, RetrySafe retry_safe,
                    absl::FunctionRef<grpc::Status(grpc::ClientContext*)> attempt) const;

  // A unary method of the stub.
  template <class Request, class Response>
  absl::Status Unary(grpc::Status (v1::Attention::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                     const Request& request, Response* response, const CallOptions& call, RetrySafe retry_safe) {
    absl::Status size = CheckSize(request);
    if (!size.ok()) return size;
    return Call(call, retry_safe,
                [&](grpc::ClientContext* context) { return (stub_.get()->*method)(context, request, response); });
  }

 private:
  ClientOptions options_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Attention::Stub> stub_;
};

}  // namespace attnd::client::internal

#endif  // ATTND_CLIENT_CPP_INTERNAL_TRANSPORT_H_

// The gRPC half of the client: channel, stub, and what every call gets (deadline, token, retries). Not included by
// the public headers.
#ifndef ATTND_CLIENT_CPP_INTERNAL_TRANSPORT_H_
#define ATTND_CLIENT_CPP_INTERNAL_TRANSPORT_H_

#include <google/protobuf/message_lite.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "attnd/v1/attnd.grpc.pb.h"
#include "client/cpp/internal/status.h"
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

  // The same without waiting and without retries: `done` is called once, on a thread of gRPC's, or on this one when
  // nothing was sent. The transport must outlive the call: the last to hold a channel may not be one of its callbacks
  // (gRPC 1.51 joins its threads where a channel is destroyed).
  template <class Request, class Response>
  void UnaryAsync(void (v1::Attention::StubInterface::async_interface::*method)(grpc::ClientContext*, const Request*,
                                                                                Response*,
                                                                                std::function<void(grpc::Status)>),
                  Request request, const CallOptions& call, std::function<void(absl::Status, Response*)> done) {
    struct Pending {
      Request request;
      Response response;
      std::shared_ptr<grpc::ClientContext> context = std::make_shared<grpc::ClientContext>();
      std::optional<std::stop_callback<std::function<void()>>> cancel;
    };
    absl::Status size = CheckSize(request);
    if (!size.ok()) return done(size, nullptr);
    auto pending = std::make_shared<Pending>();
    pending->request = std::move(request);
    pending->context->set_deadline(absl::ToChronoTime(absl::Now() + TimeoutOr(call.timeout)));
    Prepare(*pending->context);
    pending->cancel.emplace(call.stop, [weak = std::weak_ptr<grpc::ClientContext>(pending->context)] {
      if (const std::shared_ptr<grpc::ClientContext> held = weak.lock()) held->TryCancel();
    });
    (stub_->async()->*method)(pending->context.get(), &pending->request, &pending->response,
                              [pending, done = std::move(done)](const grpc::Status& status) {
                                pending->cancel.reset();
                                // Before `done`, whose owner may end the channel then: a context holds its channel.
                                pending->context.reset();
                                done(FromGrpc(status), &pending->response);
                              });
  }

 private:
  ClientOptions options_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Attention::Stub> stub_;
};

}  // namespace attnd::client::internal

#endif  // ATTND_CLIENT_CPP_INTERNAL_TRANSPORT_H_

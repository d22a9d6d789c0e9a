// One call of grpc.health.v1.Health. Its two messages are written and read by hand: code generated from health.proto
// would clash with that of a program which links this library and has generated its own.
#ifndef ATTND_CLIENT_CPP_INTERNAL_HEALTH_H_
#define ATTND_CLIENT_CPP_INTERNAL_HEALTH_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <memory>
#include <string>

namespace attnd::client::internal {

// Sets `serving` to whether the answer was SERVING. Otherwise gRPC's status, NOT_FOUND for a service that the server
// does not know.
grpc::Status CheckHealth(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context,
                         const std::string& service, bool* serving);

}  // namespace attnd::client::internal

#endif  // ATTND_CLIENT_CPP_INTERNAL_HEALTH_H_

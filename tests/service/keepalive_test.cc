// G02: a client that pings while nothing happens is not sent away (gRPC's default answers GOAWAY too_many_pings to the
// third ping within five minutes).
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include "absl/time/clock.h"
#include "tests/service/harness.h"

namespace attnd::testing {
namespace {

TEST_F(ServiceTest, G02_AnIdleClientMayPing) {
  StartServer();
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS,
                   5'100);  // our clients ping every 10 s; as quick as is allowed, for speed
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  const auto channel = grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), arguments);
  stub_ = v1::Attention::NewStub(channel);
  Info();
  ASSERT_EQ(channel->GetState(false), GRPC_CHANNEL_READY);
  absl::SleepFor(absl::Seconds(22));  // four pings
  EXPECT_EQ(channel->GetState(false), GRPC_CHANNEL_READY);
  Info();
}

}  // namespace
}  // namespace attnd::testing

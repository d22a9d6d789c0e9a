// Connections that nobody uses, and connections that are dead without a word.
//
// G02: a client that pings while nothing happens is not sent away (gRPC's default answers GOAWAY too_many_pings to the
// third ping within five minutes).
#include <arpa/inet.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/service/harness.h"
#include "tests/service/http_get.h"

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

// One TCP connection, passed on to the server until Freeze: from then on both ends stay open and nothing moves, as when
// a cable is pulled.
class Relay {
 public:
  explicit Relay(const std::string& server) : listener_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    EXPECT_EQ(bind(listener_, reinterpret_cast<const sockaddr*>(&address), length), 0);
    EXPECT_EQ(listen(listener_, 1), 0);
    getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
    address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
    thread_ = std::thread([this, server] { Run(server); });
  }
  ~Relay() {
    stop_ = true;
    thread_.join();
    close(listener_);
  }
  const std::string& address() const { return address_; }
  void Freeze() { frozen_ = true; }

 private:
  static constexpr int kPollMs = 20;

  void Run(const std::string& server) {
    pollfd waiting{listener_, POLLIN, 0};
    while (!stop_ && poll(&waiting, 1, kPollMs) <= 0) {
    }
    if (stop_) return;
    const int client = accept(listener_, nullptr, nullptr), upstream = HttpConnect(server);
    while (!stop_) {
      if (frozen_) {
        absl::SleepFor(absl::Milliseconds(kPollMs));
        continue;
      }
      pollfd ends[] = {{client, POLLIN, 0}, {upstream, POLLIN, 0}};
      if (poll(ends, 2, kPollMs) <= 0) continue;
      if (ends[0].revents != 0 && !Pass(client, upstream)) break;
      if (ends[1].revents != 0 && !Pass(upstream, client)) break;
    }
    close(client);
    close(upstream);
  }
  static bool Pass(int from, int to) {
    char buffer[16384];
    const ssize_t n = read(from, buffer, sizeof(buffer));
    return n > 0 && write(to, buffer, static_cast<size_t>(n)) == n;
  }

  const int listener_;
  std::string address_;
  std::atomic<bool> frozen_{false}, stop_{false};
  std::thread thread_;
};

// The server pings a silent client after 30 s and gives it 10 s to answer.
TEST_F(ServiceTest, G03_AHalfOpenConnectionFreesItsStreamAndKeepsItsSession) {
  StartServer();
  const std::string id = Create();
  Relay relay(server_->address());
  const auto stub = v1::Attention::NewStub(grpc::CreateChannel(relay.address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto stream = stub->StepStream(&context);
  ASSERT_TRUE(stream->Write(MeanStep(id, {2, 4})));
  v1::StepResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(Metric("attnd_streams_active"), 1);
  relay.Freeze();
  EXPECT_TRUE(WaitForMetric("attnd_streams_active", 0, absl::Seconds(70)));
  EXPECT_TRUE(WaitForMetric("attnd_requests_in_flight", 0));
  EXPECT_EQ(Mean(id, {6}), Floats({4}));
  context.TryCancel();
  EXPECT_FALSE(stream->Finish().ok());
}

}  // namespace
}  // namespace attnd::testing

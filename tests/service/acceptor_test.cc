// The listening sockets by themselves: addresses, the bound, and the end of file descriptors.
#include "server/acceptor.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "tests/service/harness.h"
#include "tests/service/http_get.h"

namespace attnd::testing {
namespace {

int ConnectUnix(const std::string& path) {
  const int connection = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, path.size());
  if (connect(connection, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) return connection;
  close(connection);
  return -1;
}

// Whether the other end has closed or reset the connection.
bool IsClosed(int connection) {
  char byte;
  return recv(connection, &byte, 1, MSG_DONTWAIT) == 0 || errno == ECONNRESET;
}

class AcceptorTest : public ::testing::Test {
 protected:
  ~AcceptorTest() override {
    if (acceptor_ != nullptr) acceptor_->Stop();
    for (const int connection : clients_) close(connection);
    CloseServed();
  }
  void Start(const std::string& address, int max_connections) {
    auto acceptor = Acceptor::Listen(address);
    ASSERT_TRUE(acceptor.ok()) << acceptor.status();
    acceptor_ = *std::move(acceptor);
    acceptor_->Start(
        max_connections,
        [this](int, int connection) {
          absl::MutexLock lock(&mutex_);
          served_.push_back(connection);
        },
        [this] { ++refused_; });
  }
  void Connect(int count) {
    for (int i = 0; i < count; ++i) {
      clients_.push_back(HttpConnect(acceptor_->address()));
      ASSERT_GE(clients_.back(), 0);
    }
  }
  size_t served() {
    absl::MutexLock lock(&mutex_);
    return served_.size();
  }
  void CloseServed() {
    absl::MutexLock lock(&mutex_);
    for (const int connection : served_) close(connection);
    served_.clear();
  }

  absl::Mutex mutex_;
  std::vector<int> served_ ABSL_GUARDED_BY(mutex_);
  std::atomic<int> refused_{0};
  std::vector<int> clients_;
  std::unique_ptr<Acceptor> acceptor_;
};

TEST_F(AcceptorTest, TakesAFreePortOfEveryAddressOfAName) {
  Start("localhost:0", 10);
  EXPECT_TRUE(absl::StartsWith(acceptor_->address(), "localhost:")) << acceptor_->address();
  EXPECT_FALSE(absl::EndsWith(acceptor_->address(), ":0"));
  Connect(1);
  EXPECT_TRUE(Eventually([&] { return served() == 1; }));
  absl::MutexLock lock(&mutex_);
  EXPECT_NE(fcntl(served_[0], F_GETFL) & O_NONBLOCK, 0);
}

TEST_F(AcceptorTest, AnIpv6AddressAndTheWildcardAreTaken) {
  Start("0.0.0.0:0", 10);
  Connect(1);
  EXPECT_TRUE(Eventually([&] { return served() == 1; }));
  const int probe = socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 loopback{};
  loopback.sin6_family = AF_INET6;
  loopback.sin6_addr = in6addr_loopback;
  const bool has_ipv6 = bind(probe, reinterpret_cast<const sockaddr*>(&loopback), sizeof(loopback)) == 0;
  close(probe);
  if (!has_ipv6) return;
  const auto six = Acceptor::Listen("[::1]:0");
  ASSERT_TRUE(six.ok()) << six.status();
  EXPECT_TRUE(absl::StartsWith((*six)->address(), "[::1]:")) << (*six)->address();
}

TEST_F(AcceptorTest, WhatCannotBeBoundIsNamedWithTheReason) {
  Start("127.0.0.1:0", 10);
  const auto message = [](const std::string& address) {
    return std::string(Acceptor::Listen(address).status().message());
  };
  const std::string taken = message(acceptor_->address());
  EXPECT_TRUE(absl::StrContains(taken, acceptor_->address()) && absl::StrContains(taken, "in use")) << taken;
  EXPECT_TRUE(absl::StrContains(message("192.0.2.1:0"), "not one of this machine")) << message("192.0.2.1:0");
  EXPECT_FALSE(message("no-such-host.invalid:0").empty());
  EXPECT_FALSE(message("unix:/nonexistent/folder/socket").empty());
}

TEST_F(AcceptorTest, AUnixSocketIsTakenOverFromTheDeadAloneAndRemovedAtTheEnd) {
  const std::string path = absl::StrCat(::testing::TempDir(), "/attnd_acceptor_", getpid());
  Start("unix:" + path, 10);
  clients_.push_back(ConnectUnix(path));
  EXPECT_TRUE(Eventually([&] { return served() == 1; }));
  EXPECT_EQ(Acceptor::Listen("unix:" + path).status().code(), absl::StatusCode::kUnavailable);
  acceptor_->Stop();
  EXPECT_NE(access(path.c_str(), F_OK), 0);

  const int dead = socket(AF_UNIX, SOCK_STREAM, 0);  // bound and left behind
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, path.size());
  ASSERT_EQ(bind(dead, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  close(dead);
  EXPECT_TRUE(Acceptor::Listen("unix:" + path).ok());

  std::ofstream(path) << "a file of somebody";
  EXPECT_FALSE(Acceptor::Listen("unix:" + path).ok());
  EXPECT_EQ(access(path.c_str(), F_OK), 0) << "what is no socket is left alone";
  unlink(path.c_str());
}

TEST_F(AcceptorTest, ConnectionsBeyondTheBoundAreResetAndPlacesComeBack) {
  Start("127.0.0.1:0", 20);
  // The clients' descriptors are in this process too, so every connection counts twice.
  Connect(5);
  ASSERT_TRUE(Eventually([&] { return served() == 5; }));
  // One at a time: those that all connect before any is accepted would leave no place for their other ends.
  for (size_t connected = 6; connected <= 35; ++connected) {
    Connect(1);
    ASSERT_TRUE(Eventually([&] { return served() + refused_ == connected; }));
  }
  EXPECT_GE(served(), 7u);
  EXPECT_LE(served(), 20u);
  EXPECT_GT(refused_, 10);
  EXPECT_TRUE(Eventually([&] { return IsClosed(clients_.back()); }));
  EXPECT_FALSE(IsClosed(clients_.front()));

  for (const int connection : clients_) close(connection);
  clients_.clear();
  CloseServed();
  const int before = refused_;
  Connect(5);
  EXPECT_TRUE(Eventually([&] { return served() == 5; }));
  EXPECT_EQ(refused_, before);
}

TEST_F(AcceptorTest, WithoutDescriptorsConnectionsAreResetAndThenServedAgain) {
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  Start("127.0.0.1:0", 1 << 20);  // no bound but the system's
  std::vector<int> clients;
  for (int i = 0; i < 4; ++i) clients.push_back(socket(AF_INET, SOCK_STREAM, 0));
  std::vector<int> fillers;
  const rlimit few{static_cast<rlim_t>(clients.back() + 8), before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  for (int filler; (filler = dup(0)) >= 0;) fillers.push_back(filler);
  sockaddr_in target{};
  target.sin_family = AF_INET;
  const std::string& address = acceptor_->address();
  target.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  target.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (const int client : clients) connect(client, reinterpret_cast<const sockaddr*>(&target), sizeof(target));
  EXPECT_TRUE(Eventually([&] { return refused_ == 4; })) << refused_;
  for (const int client : clients) {
    EXPECT_TRUE(Eventually([&] { return IsClosed(client); }));
    close(client);
  }
  for (const int filler : fillers) close(filler);
  setrlimit(RLIMIT_NOFILE, &before);
  Connect(3);
  EXPECT_TRUE(Eventually([&] { return served() == 3; }));
}

TEST_F(AcceptorTest, StopClosesTheDoorAndLeavesConnectionsAlone) {
  Start("127.0.0.1:0", 10);
  Connect(1);
  ASSERT_TRUE(Eventually([&] { return served() == 1; }));
  acceptor_->Stop();
  EXPECT_LT(HttpConnect(acceptor_->address()), 0);
  EXPECT_FALSE(IsClosed(clients_[0]));
  acceptor_->Stop();
}

}  // namespace
}  // namespace attnd::testing

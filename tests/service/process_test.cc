// The program itself: flags, environment, start-up line, signals, exit statuses.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/service/harness.h"
#include "tests/service/http_get.h"
#include "tests/service/program.h"

namespace attnd::testing {
namespace {

const std::vector<std::string> kFreePorts = {"--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0",
                                             "--kv_cache_bytes=64MiB"};

TEST(ProcessTest, StartsServesAndEndsOnSigterm) {
  Program program(kFreePorts);
  ASSERT_TRUE(program.AwaitStart()) << program.err();
  EXPECT_TRUE(absl::StartsWith(program.out(), "attnd 0.1.0 serving on 127.0.0.1:"));
  EXPECT_TRUE(absl::StrContains(HttpGet(program.metrics_address, "/metrics"), "attnd_ready 1"));
  program.Signal(SIGTERM);
  EXPECT_EQ(program.Wait(), 0) << program.err();
  EXPECT_TRUE(absl::StrContains(program.err(), "drained")) << program.err();
}

TEST(ProcessTest, EndsOnSigintToo) {
  Program program(kFreePorts);
  ASSERT_TRUE(program.AwaitStart()) << program.err();
  program.Signal(SIGINT);
  EXPECT_EQ(program.Wait(), 0) << program.err();
}

TEST(ProcessTest, VersionAndHelpSucceed) {
  Program version({"--version"});
  EXPECT_EQ(version.Wait(), 0);
  EXPECT_EQ(version.out(), "attnd 0.1.0\n");
  Program help({"--help"});
  EXPECT_EQ(help.Wait(), 0);
  for (const char* text :
       {"--kv_cache_bytes=auto", "--listen=127.0.0.1:50051", "--drain_timeout=30s", "--eviction=none", "ATTND_"}) {
    EXPECT_TRUE(absl::StrContains(help.out(), text)) << text;
  }
}

TEST(ProcessTest, WhatIsNotUnderstoodIsAnError) {
  Program unknown({"--listne=127.0.0.1:0"});
  EXPECT_EQ(unknown.Wait(), 1);
  EXPECT_TRUE(absl::StrContains(unknown.err(), "listne")) << unknown.err();
  Program argument({"127.0.0.1:0"});
  EXPECT_EQ(argument.Wait(), 1);
  EXPECT_TRUE(absl::StrContains(argument.err(), "unexpected argument")) << argument.err();
  Program value({"--kv_cache_bytes=lots"});
  EXPECT_EQ(value.Wait(), 1);
  Program range({"--kv_cache_bytes=1"});
  EXPECT_EQ(range.Wait(), 1);
  EXPECT_TRUE(absl::StrContains(range.err(), "--kv_cache_bytes is 1")) << range.err();
  Program environment({"--version_of_nothing"}, {"ATTND_MAX_SESSIONS=many"});
  EXPECT_EQ(environment.Wait(), 1);
  EXPECT_TRUE(absl::StrContains(environment.err(), "ATTND_MAX_SESSIONS")) << environment.err();
  Program file({"--auth_tokens_file=/nonexistent", "--listen=127.0.0.1:0", "--metrics_listen="});
  EXPECT_EQ(file.Wait(), 1);
  EXPECT_TRUE(absl::StrContains(file.err(), "/nonexistent")) << file.err();
}

TEST(ProcessTest, EnvironmentFlagfileAndCommandLineInThatOrder) {
  Program environment({"--print_config"}, {"ATTND_KV_CACHE_BYTES=1GiB", "ATTND_MAX_SESSIONS=5"});
  EXPECT_EQ(environment.Wait(), 0) << environment.err();
  EXPECT_TRUE(absl::StrContains(environment.out(), "--kv_cache_bytes=1GiB\n")) << environment.out();
  EXPECT_TRUE(absl::StrContains(environment.out(), "--max_sessions=5\n"));

  const std::string flagfile = absl::StrCat(::testing::TempDir(), "/attnd_flags_", getpid());
  std::ofstream(flagfile) << environment.out();
  Program both({"--print_config", "--flagfile=" + flagfile, "--max_sessions=7"}, {"ATTND_KV_CACHE_BYTES=2GiB"});
  EXPECT_EQ(both.Wait(), 0) << both.err();
  EXPECT_TRUE(absl::StrContains(both.out(), "--kv_cache_bytes=1GiB\n")) << both.out();
  EXPECT_TRUE(absl::StrContains(both.out(), "--max_sessions=7\n"));
  unlink(flagfile.c_str());
}

TEST(ProcessTest, WhereSessionsGoCanBeSaidInAllThreeWays) {
  const std::vector<std::string> environment = {"ATTND_EVICTION=lru", "ATTND_SPILL_DIR=/spill", "ATTND_RESTORE=/old",
                                                "ATTND_SNAPSHOT_ON_DRAIN=/new"};
  const std::string lines = "--eviction=lru\n--spill_dir=/spill\n--restore=/old\n--snapshot_on_drain=/new\n";
  Program program({"--print_config"}, environment);
  EXPECT_EQ(program.Wait(), 0) << program.err();
  EXPECT_TRUE(absl::StrContains(program.out(), lines)) << program.out();

  const std::string flagfile = absl::StrCat(::testing::TempDir(), "/attnd_flags_room_", getpid());
  std::ofstream(flagfile) << lines;
  Program from_file({"--print_config", "--flagfile=" + flagfile, "--restore="});
  EXPECT_EQ(from_file.Wait(), 0) << from_file.err();
  EXPECT_TRUE(absl::StrContains(from_file.out(), "--spill_dir=/spill\n--restore=\n")) << from_file.out();
  unlink(flagfile.c_str());

  Program none({"--print_config"});
  EXPECT_EQ(none.Wait(), 0);
  EXPECT_TRUE(absl::StrContains(none.out(), "--eviction=none\n--spill_dir=\n--restore=\n--snapshot_on_drain=\n"));

  Program wrong({"--print_config"}, {"ATTND_EVICTION=random"});
  EXPECT_EQ(wrong.Wait(), 1);
  EXPECT_TRUE(absl::StrContains(wrong.err(), "but must be none or lru")) << wrong.err();
  Program alone({"--print_config", "--spill_dir=/spill"});
  EXPECT_EQ(alone.Wait(), 1);
  EXPECT_TRUE(absl::StrContains(alone.err(), "which needs --eviction=lru")) << alone.err();
}

TEST(ProcessTest, AFlagfileThatNamesItselfIsRefused) {
  const std::string flagfile = absl::StrCat(::testing::TempDir(), "/attnd_flags_loop_", getpid());
  std::ofstream(flagfile) << "--max_sessions=7\n--flagfile=" << flagfile << "\n";
  Program program({"--print_config", "--flagfile=" + flagfile});
  EXPECT_EQ(program.Wait(), 1);
  EXPECT_TRUE(absl::StrContains(program.err(), "names another flagfile")) << program.err();
  unlink(flagfile.c_str());
}

TEST(ProcessTest, M06_PortsInUseAndForeignAddressesEndWithAMessage) {
  Program first(kFreePorts);
  ASSERT_TRUE(first.AwaitStart()) << first.err();
  Program grpc_port({"--listen=" + first.address, "--metrics_listen=", "--kv_cache_bytes=64MiB"});
  EXPECT_EQ(grpc_port.Wait(), 1);
  EXPECT_TRUE(absl::StrContains(grpc_port.err(), "cannot listen on " + first.address)) << grpc_port.err();
  Program metrics_port({"--listen=127.0.0.1:0", "--metrics_listen=" + first.metrics_address, "--kv_cache_bytes=64MiB"});
  EXPECT_EQ(metrics_port.Wait(), 1);
  EXPECT_TRUE(absl::StrContains(metrics_port.err(), "cannot serve metrics on " + first.metrics_address))
      << metrics_port.err();
  Program foreign({"--listen=192.0.2.1:5000", "--metrics_listen=", "--kv_cache_bytes=64MiB"});
  EXPECT_EQ(foreign.Wait(), 1);
  EXPECT_TRUE(absl::StrContains(foreign.err(), "192.0.2.1:5000")) << foreign.err();
  EXPECT_TRUE(absl::StrContains(HttpGet(first.metrics_address, "/metrics"), "attnd_ready 1"));
}

// A service manager's end of NOTIFY_SOCKET. A name that begins with "@" has no file.
class NotifySocket {
 public:
  explicit NotifySocket(const std::string& name) : name_(name), socket_(socket(AF_UNIX, SOCK_DGRAM, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, name.data(), name.size());
    if (name[0] == '@') address.sun_path[0] = '\0';
    const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
    EXPECT_EQ(bind(socket_, reinterpret_cast<const sockaddr*>(&address), bytes), 0) << name;
    const timeval patience = {.tv_sec = 30, .tv_usec = 0};
    setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  }
  ~NotifySocket() {
    close(socket_);
    if (name_[0] == '/') unlink(name_.c_str());
  }
  std::string Receive() {
    char buffer[512];
    const ssize_t received = recv(socket_, buffer, sizeof(buffer), 0);
    return received > 0 ? std::string(buffer, received) : "";
  }

 private:
  const std::string name_;
  const int socket_;
};

TEST(ProcessTest, AServiceManagerIsToldOfReadinessAndOfTheDrain) {
  for (const std::string& name :
       {absl::StrCat(::testing::TempDir(), "/attnd_notify_", getpid()), absl::StrCat("@attnd_notify_", getpid())}) {
    NotifySocket manager(name);
    const std::string variable = "NOTIFY_SOCKET=" + name;
    Program program(kFreePorts, {variable});
    const std::string ready = manager.Receive();
    EXPECT_TRUE(absl::StartsWith(ready, "READY=1\n")) << ready;
    ASSERT_TRUE(program.AwaitStart()) << program.err();
    EXPECT_TRUE(absl::StrContains(ready, "STATUS=serving on " + program.address)) << ready;
    EXPECT_TRUE(absl::StrContains(HttpGet(program.metrics_address, "/readyz"), "200 OK")) << "told when it was true";
    program.Signal(SIGTERM);
    EXPECT_TRUE(absl::StartsWith(manager.Receive(), "STOPPING=1\n"));
    EXPECT_EQ(program.Wait(), 0) << program.err();
    EXPECT_FALSE(absl::StrContains(program.err(), "service manager")) << program.err();
  }
}

TEST(ProcessTest, AServiceManagerThatDoesNotListenStopsNothing) {
  for (const char* variable : {"NOTIFY_SOCKET=/nonexistent/notify", "NOTIFY_SOCKET=no path"}) {
    Program program(kFreePorts, {variable});
    ASSERT_TRUE(program.AwaitStart()) << program.err();
    EXPECT_TRUE(Eventually([&] { return absl::StrContains(program.err(), "the service manager was not told"); }));
    program.Signal(SIGTERM);
    EXPECT_EQ(program.Wait(), 0) << program.err();
  }
}

TEST(ProcessTest, ListeningBeyondLoopbackWithoutTlsIsWarnedOf) {
  Program program({"--listen=0.0.0.0:0", "--metrics_listen=", "--kv_cache_bytes=64MiB"});
  ASSERT_TRUE(program.AwaitStart()) << program.err();
  EXPECT_TRUE(absl::StrContains(program.err(), "WARNING listening beyond loopback without TLS")) << program.err();
}

}  // namespace
}  // namespace attnd::testing

// The C++ client's exports and imports, against a real server.
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "tests/service/harness.h"
#include "tests/service/transfer_calls.h"

namespace attnd::testing {
namespace {

class ClientTransferTest : public ServiceTest {
 protected:
  void Connect(const Options& options = DefaultOptions()) {
    StartServer(options);
    absl::StatusOr<Client> client = Client::Connect({.target = server_->address(), .own_connection = true});
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = std::make_unique<Client>(*std::move(client));
  }
  void TearDown() override { client_.reset(); }

  absl::StatusOr<std::string> Export(const std::string& id, const client::CallOptions& call = {}) {
    std::string bytes;
    const absl::Status status = client_->ExportSession(
        id,
        [&](std::string_view piece, int64_t total_bytes) {
          total_bytes_ = total_bytes;
          bytes += piece;
          return absl::OkStatus();
        },
        call);
    if (!status.ok()) return status;
    return bytes;
  }
  static client::SnapshotSource Once(std::string bytes) {
    return [bytes = std::move(bytes)]() mutable { return std::exchange(bytes, ""); };
  }
  static std::string Reason(const absl::Status& status) { return client::GetErrorDetails(status).reason; }

  std::unique_ptr<Client> client_;
  int64_t total_bytes_ = 0;
};

TEST_F(ClientTransferTest, ASessionGoesOutAndComesIn) {
  Connect();
  const std::string id = Create();
  Mean(id, {1, 2, 3});
  const absl::StatusOr<std::string> bytes = Export(id);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_EQ(total_bytes_, static_cast<int64_t>(bytes->size()));
  client::SessionConfig expected;
  const absl::StatusOr<ClientSession> copy = client_->ImportSession(Once(*bytes), &expected);
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(Mean(copy->id(), {6}), Floats({3}));
  EXPECT_EQ(copy->config().num_layers, 1);

  expected.num_q_heads = 4;
  EXPECT_EQ(Reason(client_->ImportSession(Once(*bytes), &expected).status()), "BAD_CONFIG");
  EXPECT_EQ(Reason(client_->ImportSession(Once(bytes->substr(1))).status()), "BAD_SNAPSHOT");
  EXPECT_EQ(Reason(client_->ImportSession(Once("")).status()), "BAD_SNAPSHOT");
  EXPECT_EQ(Reason(client_->ImportSession(Once(""), &expected).status()), "BAD_SNAPSHOT");
  EXPECT_TRUE(client::IsSessionLost(Export(std::string(32, '0')).status()));
  EXPECT_EQ(Metric("attnd_sessions_active"), 2);
}

// A source may give more than a message holds, and an error of the server ends it early.
TEST_F(ClientTransferTest, LargePiecesAreCutAndAnEndIsNoticed) {
  Connect();
  const std::string id = CreateBig(stub_.get(), 24);
  const absl::StatusOr<std::string> bytes = Export(id);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_TRUE(client_->ImportSession(Once(*bytes)).ok());
  int asked = 0;
  const absl::StatusOr<ClientSession> refused = client_->ImportSession([&]() -> absl::StatusOr<std::string> {
    asked++;
    return *bytes;  // for ever
  });
  EXPECT_EQ(Reason(refused.status()), "CACHE_FULL") << refused.status();
  EXPECT_LE(asked, 2);
}

TEST_F(ClientTransferTest, WhatTheCallerReturnsEndsTheTransfer) {
  Connect();
  const std::string id = CreateBig(stub_.get(), 16);
  const double used = Metric("attnd_kv_cache_used_bytes");
  const absl::Status full = absl::ResourceExhaustedError("the disk is full");
  int pieces = 0;
  EXPECT_EQ(
      client_->ExportSession(id, [&](std::string_view, int64_t) { return ++pieces == 2 ? full : absl::OkStatus(); }),
      full);
  EXPECT_EQ(pieces, 2);
  const std::string bytes = Export(id).value();
  int asked = 0;
  EXPECT_EQ(client_
                ->ImportSession([&]() -> absl::StatusOr<std::string> {
                  if (++asked == 2) return full;
                  return bytes.substr(0, 1 << 20);
                })
                .status(),
            full);
  EXPECT_TRUE(WaitForMetric("attnd_streams_active", 0));
  EXPECT_TRUE(WaitForMetric("attnd_kv_cache_used_bytes", used));
  EXPECT_EQ(Metric("attnd_sessions_active"), 1);
}

// The wait for the server is bounded, not the time that the caller takes.
TEST_F(ClientTransferTest, AServerThatDoesNotGoOnIsADeadline) {
  Connect();
  const std::string id = Create();
  Mean(id, {1});
  const std::string bytes = Export(id).value();
  gate_.Close();
  std::thread step([&] { Mean(id, Floats(20, 1)); });
  gate_.AwaitBatch();
  const absl::Time start = absl::Now();
  const client::CallOptions call = {.timeout = absl::Milliseconds(200)};
  EXPECT_EQ(Export(id, call).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  std::stop_source stop;
  std::thread stopper([&] {
    absl::SleepFor(absl::Milliseconds(50));
    stop.request_stop();
  });
  EXPECT_EQ(Export(id, {.stop = stop.get_token()}).status().code(), absl::StatusCode::kCancelled);
  stopper.join();
  gate_.Open();
  step.join();
  bool slept = false;
  const absl::StatusOr<ClientSession> slow = client_->ImportSession(
      [&]() -> absl::StatusOr<std::string> {
        if (std::exchange(slept, true)) return std::string();
        absl::SleepFor(absl::Milliseconds(500));
        return bytes;
      },
      nullptr, call);
  EXPECT_TRUE(slow.ok()) << slow.status();
}

}  // namespace
}  // namespace attnd::testing

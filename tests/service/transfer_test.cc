// Exports and imports as clients see them: what comes back, what is refused and leaves no trace, what is given up.
#include <atomic>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "tests/service/harness.h"
#include "tests/service/transfer_calls.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;

class TransferTest : public ServiceTest {
 protected:
  // Nothing of a transfer is left.
  void ExpectIdle(double used_bytes, double sessions) {
    EXPECT_TRUE(WaitForMetric("attnd_streams_active", 0));
    EXPECT_TRUE(WaitForMetric("attnd_inflight_bytes", 0));
    EXPECT_TRUE(WaitForMetric("attnd_kv_cache_used_bytes", used_bytes));
    EXPECT_EQ(Metric("attnd_kv_cache_shared_bytes"), 0);
    EXPECT_EQ(Metric("attnd_sessions_active"), sessions);
  }
  // INVALID_ARGUMENT with that reason.
  void ExpectRefused(const std::string& bytes, const std::string& reason, const v1::SessionConfig* expected = nullptr) {
    v1::Session session;
    const grpc::Status status = Import(stub_.get(), bytes, &session, expected);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_EQ(ReasonOf(status), reason) << status.error_message();
    message_ = status.error_message();
  }
  std::string message_;
};

TEST_F(TransferTest, WhatIsExportedIsImported) {
  StartServer();
  const std::string id = Create();
  Mean(id, {1, 2, 3});
  const std::string bytes = Export(stub_.get(), id);
  const v1::SessionConfig expected = MeanConfig();
  for (const size_t piece : {size_t{1}, size_t{7}, bytes.size()}) {
    v1::Session session;
    ASSERT_TRUE(Import(stub_.get(), bytes, &session, &expected, piece).ok());
    EXPECT_EQ(session.length(), 3);
    EXPECT_EQ(session.used_bytes(), Get(id).used_bytes());
    EXPECT_NE(session.session_id(), id);
    EXPECT_EQ(Mean(session.session_id(), {6}), Floats({3}));
    EXPECT_EQ(Export(stub_.get(), id), bytes) << "the copy is the original's no more than anyone else's";
    EXPECT_TRUE(Close(session.session_id()).ok());
  }
  EXPECT_EQ(Mean(id, {6}), Floats({3}));
  EXPECT_TRUE(Close(id).ok());
  ExpectIdle(0, 0);
  EXPECT_EQ(Handled("ExportSession", "OK"), 4);
  EXPECT_EQ(Handled("ImportSession", "OK"), 3);
  EXPECT_EQ(Metric("attnd_sessions_created_total{origin=\"import\"}"), 3);
  EXPECT_EQ(Metric("attnd_snapshot_bytes_total{op=\"export\"}"), 4.0 * static_cast<double>(bytes.size()));
  EXPECT_EQ(Metric("attnd_snapshot_bytes_total{op=\"import\"}"), 3.0 * static_cast<double>(bytes.size()));
  EXPECT_EQ(Metric("attnd_snapshot_duration_seconds_count{op=\"import\"}"), 3);
}

TEST_F(TransferTest, S17_BadSnapshotsChangeNothing) {
  StartServer();
  const std::string live = Create(), empty = Create();
  Mean(live, {1, 2, 3});
  const double used = Metric("attnd_kv_cache_used_bytes");
  const std::string bytes = Export(stub_.get(), live);
  v1::Session session;
  ASSERT_TRUE(Import(stub_.get(), Export(stub_.get(), empty), &session).ok());
  EXPECT_EQ(session.length(), 0);
  EXPECT_TRUE(Close(session.session_id()).ok());

  ExpectRefused("", "BAD_SNAPSHOT");
  ExpectRefused("not a snapshot at all", "BAD_SNAPSHOT");
  for (const size_t size : {size_t{1}, size_t{20}, bytes.size() / 2, bytes.size() - 1}) {
    ExpectRefused(bytes.substr(0, size), "BAD_SNAPSHOT");
    EXPECT_TRUE(absl::StrContains(message_, std::to_string(size))) << message_;
  }
  for (size_t i = 0; i < bytes.size(); i += 37) {
    std::string flipped = bytes;
    flipped[i] ^= 1;
    ExpectRefused(flipped, "BAD_SNAPSHOT");
    EXPECT_TRUE(absl::StrContains(message_, "found by byte")) << message_;
  }
  std::string future = bytes;
  future[8] = 2;
  ExpectRefused(future, "BAD_SNAPSHOT");
  EXPECT_TRUE(absl::StrContains(message_, "version 2")) << message_;

  v1::SessionConfig other = MeanConfig();
  other.set_num_q_heads(2);
  ExpectRefused(bytes, "BAD_CONFIG", &other);
  other = MeanConfig();
  other.set_head_dim(3);
  ExpectRefused(bytes, "BAD_CONFIG", &other);
  EXPECT_TRUE(absl::StrContains(message_, "head_dim 1, expected was 3")) << message_;
  other = MeanConfig();
  other.set_kv_dtype(v1::KV_DTYPE_INT8);
  ExpectRefused(bytes, "BAD_CONFIG", &other);
  other.set_head_dim(-1);
  ExpectRefused(bytes, "BAD_CONFIG", &other);

  ExpectIdle(used, 2);
  EXPECT_EQ(Mean(live, {6}), Floats({3}));
  EXPECT_EQ(Handled("ImportSession", "INVALID_ARGUMENT"), Metric("attnd_rejected_total{reason=\"BAD_SNAPSHOT\"}") +
                                                              Metric("attnd_rejected_total{reason=\"BAD_CONFIG\"}"));
}

TEST_F(TransferTest, AnExpectedConfigurationComesFirstOrNotAtAll) {
  StartServer();
  const std::string bytes = Export(stub_.get(), Create());
  OpenImport import(stub_.get());
  EXPECT_TRUE(import.Write(bytes.substr(0, 10)));
  v1::ImportSessionRequest request;
  *request.mutable_expected() = MeanConfig();
  import.writer->Write(request);
  import.writer->WritesDone();
  const grpc::Status status = import.writer->Finish();
  EXPECT_EQ(ReasonOf(status), "BAD_CONFIG");
  EXPECT_TRUE(absl::StrContains(status.error_message(), "message 2"));
}

TEST_F(TransferTest, SessionsThatAreGoneSayWhy) {
  StartServer();
  const std::string id = Create();
  EXPECT_TRUE(Close(id).ok());
  std::string bytes;
  EXPECT_EQ(ReasonOf(Export(stub_.get(), id, &bytes)), "CLOSED");
  EXPECT_EQ(ReasonOf(Export(stub_.get(), std::string(32, 'a'), &bytes)), "NEVER_EXISTED");
  EXPECT_EQ(ReasonOf(Export(stub_.get(), "", &bytes)), "BAD_SESSION_ID");
  EXPECT_EQ(bytes, "");
  EXPECT_TRUE(WaitForMetric("attnd_rpc_handled_total{code=\"NOT_FOUND\",method=\"ExportSession\"}", 2));
}

TEST_F(TransferTest, TransfersCountAsStreams) {
  Options options = DefaultOptions();
  options.max_streams = 1;
  StartServer(options);
  const std::string id = CreateBig(stub_.get(), 16);
  OpenExport open(stub_.get(), id);
  ASSERT_TRUE(open.Read());
  EXPECT_EQ(Metric("attnd_streams_active"), 1);
  std::string bytes;
  EXPECT_EQ(ReasonOf(Export(stub_.get(), id, &bytes)), "STREAM_LIMIT");
  v1::Session session;
  const grpc::Status status = Import(stub_.get(), "x", &session);
  EXPECT_EQ(ReasonOf(status), "STREAM_LIMIT");
  EXPECT_TRUE(HasRetryInfo(status));
  while (open.Read()) {
  }
  EXPECT_TRUE(open.reader->Finish().ok());
  EXPECT_TRUE(WaitForMetric("attnd_streams_active", 0));
  EXPECT_EQ(Import(stub_.get(), Export(stub_.get(), id)).size(), 32u);
}

TEST_F(TransferTest, S08_AnImportThatDoesNotFitChangesNothing) {
  Options options = DefaultOptions();
  options.kv_cache_bytes = int64_t{24} << 20;
  StartServer(options);
  const std::string id = CreateBig(stub_.get(), 16);
  const double used = Metric("attnd_kv_cache_used_bytes");
  const std::string bytes = Export(stub_.get(), id);
  v1::Session session;
  grpc::Status status = Import(stub_.get(), bytes, &session);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(status), "CACHE_FULL") << status.error_message();
  EXPECT_TRUE(HasRetryInfo(status));
  ExpectIdle(used, 1);
  EXPECT_TRUE(Close(id).ok());
  EXPECT_EQ(Import(stub_.get(), bytes).size(), 32u);

  options.kv_cache_bytes = int64_t{8} << 20;
  StartServer(options);
  status = Import(stub_.get(), bytes, &session);
  EXPECT_EQ(ReasonOf(status), "TOO_MANY_TOKENS") << status.error_message();
  EXPECT_FALSE(HasRetryInfo(status));
  ExpectIdle(0, 0);
}

// A client that goes away in the middle leaves nothing, in the server's memory or in its counts.
TEST_F(TransferTest, S07_TransfersThatAreGivenUpLeaveNothing) {
  StartServer();
  const std::string id = CreateBig(stub_.get(), 24);
  const double used = Metric("attnd_kv_cache_used_bytes");
  const std::string bytes = Export(stub_.get(), id);
  for (int i = 0; i < 3; ++i) {
    {
      OpenExport open(stub_.get(), id);
      ASSERT_TRUE(open.Read());
      EXPECT_EQ(Metric("attnd_kv_cache_shared_bytes"), used);
      open.context.TryCancel();
      EXPECT_EQ(open.reader->Finish().error_code(), StatusCode::CANCELLED);
    }
    ExpectIdle(used, 1);
    {
      OpenImport open(stub_.get());
      ASSERT_TRUE(open.Write(bytes.substr(0, 2 << 20)));
      EXPECT_TRUE(WaitForMetric("attnd_kv_cache_used_bytes", 2 * used)) << "its memory is taken at once";
      open.context.TryCancel();
      EXPECT_EQ(open.writer->Finish().error_code(), StatusCode::CANCELLED);
    }
    ExpectIdle(used, 1);
    EXPECT_TRUE(WaitForMetric("attnd_rpc_handled_total{code=\"CANCELLED\",method=\"ImportSession\"}", i + 1));
  }
  EXPECT_EQ(Handled("ExportSession", "CANCELLED"), 3);
  EXPECT_EQ(Metric("attnd_rejected_total{reason=\"BAD_SNAPSHOT\"}"), 0);
}

TEST_F(TransferTest, S07_AnExportThatIsGivenUpWhileItWaitsForAStepLeavesNothing) {
  StartServer();
  const std::string id = Create();
  Mean(id, {1, 2, 3});
  const double used = Metric("attnd_kv_cache_used_bytes");
  gate_.Close();
  std::thread step([&] { Mean(id, Floats(20, 2)); });
  gate_.AwaitBatch();
  {
    OpenExport open(stub_.get(), id);
    EXPECT_TRUE(WaitForMetric("attnd_streams_active", 1));
    open.context.TryCancel();
    EXPECT_EQ(open.reader->Finish().error_code(), StatusCode::CANCELLED);
    EXPECT_TRUE(WaitForMetric("attnd_rpc_handled_total{code=\"CANCELLED\",method=\"ExportSession\"}", 1));
  }
  gate_.Open();
  step.join();
  ExpectIdle(used, 1);
  EXPECT_EQ(Mean(id, {2}), Floats({2}));
}

// Its deadline ends it as its client would.
TEST_F(TransferTest, DeadlinesEndTransfers) {
  StartServer();
  const std::string id = CreateBig(stub_.get(), 24);
  const double used = Metric("attnd_kv_cache_used_bytes");
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(200));
  v1::ExportSessionRequest request;
  request.set_session_id(id);
  const auto reader = stub_->ExportSession(&context, request);
  // The server's clock may still see it coming when the client gives up.
  EXPECT_TRUE(Eventually(
      [&] { return Handled("ExportSession", "DEADLINE_EXCEEDED") + Handled("ExportSession", "CANCELLED") == 1; }));
  ExpectIdle(used, 1);
  v1::ExportSessionResponse response;
  while (reader->Read(&response)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
}

// Steps go on while a session is exported, and the snapshot is of one moment: every layer has the same tokens.
TEST_F(TransferTest, S10_ExportsWhileStepsGoOnAreOfOneMoment) {
  StartServer();
  const std::string id = Create();
  std::atomic<bool> stop{false};
  std::thread steps([&] {
    for (int i = 1; !stop; ++i) {
      v1::StepResponse response;
      EXPECT_TRUE(Step(MeanStep(id, {static_cast<float>(i)}), &response).ok());
    }
  });
  for (int i = 0; i < 20; ++i) {
    v1::Session session;
    ASSERT_TRUE(Import(stub_.get(), Export(stub_.get(), id), &session).ok());
    // Values 1..n; their mean with one more value of the same mean is (n + 1) / 2.
    const float mean = static_cast<float>(session.length() + 1) / 2;
    EXPECT_NEAR(Mean(session.session_id(), {mean})[0], mean, mean * 1e-5) << session.length() << " tokens";
    EXPECT_TRUE(Close(session.session_id()).ok());
  }
  stop = true;
  steps.join();
}

TEST_F(TransferTest, AnExportComesThroughADrain) {
  StartServer();
  const std::string id = CreateBig(stub_.get(), 24);
  const std::string bytes = Export(stub_.get(), id);
  OpenExport open(stub_.get(), id);
  OpenImport import(stub_.get());
  ASSERT_TRUE(open.Read());
  ASSERT_TRUE(import.Write(bytes.substr(0, 100)));
  ASSERT_TRUE(WaitForMetric("attnd_streams_active", 2));
  bool complete = false;
  std::thread drain([&] { complete = server_->Drain(); });
  const grpc::Status refused = import.writer->Finish();
  EXPECT_EQ(refused.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(ReasonOf(refused), "DRAINING") << refused.error_message();
  std::string none;
  EXPECT_EQ(Export(stub_.get(), id, &none).error_code(), StatusCode::UNAVAILABLE);
  while (open.Read()) {
  }
  EXPECT_TRUE(open.reader->Finish().ok());
  EXPECT_EQ(open.received, static_cast<int64_t>(bytes.size()));
  drain.join();
  EXPECT_TRUE(complete);
}

// A client that reads too slowly is told so; one that does not read at all does not hold the server up.
TEST_F(TransferTest, AnExportThatIsTooSlowForADrainIsCutOff) {
  Options options = DefaultOptions();
  options.drain_timeout = absl::Milliseconds(500);
  StartServer(options);
  const std::string id = CreateBig(stub_.get(), 32);
  const auto other_stub = v1::Attention::NewStub(NewChannel());
  OpenExport slow(stub_.get(), id), stuck(other_stub.get(), id);
  ASSERT_TRUE(slow.Read());
  ASSERT_TRUE(stuck.Read());
  const absl::Time start = absl::Now();
  bool complete = true;
  std::thread drain([&] { complete = server_->Drain(); });
  while (slow.Read()) absl::SleepFor(absl::Milliseconds(100));
  const grpc::Status status = slow.reader->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::UNAVAILABLE) << status.error_message();
  drain.join();
  EXPECT_FALSE(complete);
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  while (stuck.Read()) {
  }
  EXPECT_FALSE(stuck.reader->Finish().ok());
}

}  // namespace
}  // namespace attnd::testing

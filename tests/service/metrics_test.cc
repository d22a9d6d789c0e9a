// What Prometheus sees. Scenario names (M01, ...) are those of the list of failures that people have reported.
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "server/metrics.h"
#include "tests/service/harness.h"
#include "tests/service/http_get.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;

class MetricsTest : public ServiceTest {
 protected:
  double SumOfHandled(absl::string_view method) {
    double sum = 0;
    for (const auto& [series, value] : AllMetrics()) {
      if (absl::StartsWith(series, "attnd_rpc_handled_total{") &&
          absl::StrContains(series, absl::StrCat("method=\"", method, "\""))) {
        sum += value;
      }
    }
    return sum;
  }

  // Cancels a step of `id` once `ready`.
  void CancelStep(const std::string& id, const std::function<void()>& ready) {
    grpc::ClientContext context;
    std::thread canceller([&] {
      ready();
      context.TryCancel();
    });
    v1::StepResponse response;
    stub_->Step(&context, MeanStep(id, {1}), &response);
    canceller.join();
  }
};

TEST_F(MetricsTest, M07_EverySeriesExistsAtZeroFromTheStart) {
  StartServer();
  const std::map<std::string, double> values = AllMetrics();
  for (const char* series : {
           "attnd_step_duration_seconds_count{phase=\"prefill\"}",
           "attnd_step_duration_seconds_count{phase=\"decode\"}",
           "attnd_queue_duration_seconds_count{phase=\"decode\"}",
           "attnd_compute_duration_seconds_count{phase=\"decode\"}",
           "attnd_rpc_handled_total{code=\"OK\",method=\"Step\"}",
           "attnd_rpc_handled_total{code=\"RESOURCE_EXHAUSTED\",method=\"CreateSession\"}",
           "attnd_rpc_duration_seconds_count{method=\"StepStream\"}",
           "attnd_requests_in_flight",
           "attnd_queue_depth",
           "attnd_queue_tokens",
           "attnd_inflight_bytes",
           "attnd_streams_active",
           "attnd_connections_refused_total",
           "attnd_batch_segments_count",
           "attnd_batch_tokens_count",
           "attnd_tokens_total{phase=\"decode\"}",
           "attnd_tokens_total{phase=\"prefill\"}",
           "attnd_rejected_total{reason=\"CACHE_FULL\"}",
           "attnd_rejected_total{reason=\"QUEUE_FULL\"}",
           "attnd_rejected_total{reason=\"STREAM_LIMIT\"}",
           "attnd_cancelled_total{stage=\"queued\"}",
           "attnd_cancelled_total{stage=\"computing\"}",
           "attnd_sessions_active",
           "attnd_sessions_created_total{origin=\"create\"}",
           "attnd_sessions_closed_total{reason=\"closed\"}",
           "attnd_sessions_closed_total{reason=\"expired\"}",
           "attnd_sessions_closed_total{reason=\"evicted\"}",
           "attnd_sessions_closed_total{reason=\"lost\"}",
           "attnd_sessions_created_total{origin=\"fork\"}",
           "attnd_sessions_created_total{origin=\"import\"}",
           "attnd_sessions_created_total{origin=\"restore\"}",
           "attnd_sessions_spilled",
           "attnd_kv_cache_evictions_total{reason=\"dropped\"}",
           "attnd_kv_cache_evictions_total{reason=\"spilled\"}",
           "attnd_snapshot_duration_seconds_count{op=\"export\"}",
           "attnd_snapshot_duration_seconds_count{op=\"restore\"}",
           "attnd_snapshot_bytes_total{op=\"import\"}",
           "attnd_snapshot_bytes_total{op=\"spill\"}",
           "attnd_snapshot_failures_total{op=\"drain\"}",
           "attnd_kv_cache_eviction_enabled",
           "attnd_spill_disk_available_bytes",
           "attnd_spill_disk_size_bytes",
           "attnd_kv_cache_reserved_bytes",
           "attnd_kv_cache_used_bytes",
           "attnd_kv_cache_shared_bytes",
           "attnd_kv_cache_spilled_bytes",
           "attnd_kv_cache_tokens",
           "attnd_kv_read_bytes_total",
           "attnd_draining",
       }) {
    const auto found = values.find(series);
    ASSERT_NE(found, values.end()) << series;
    EXPECT_EQ(found->second, 0) << series;
  }
  for (const char* series :
       {"attnd_ready", "attnd_sessions_limit", "attnd_queue_limit", "attnd_queue_tokens_limit", "attnd_streams_limit",
        "attnd_inflight_bytes_limit", "attnd_kv_cache_capacity_bytes", "process_cpu_seconds_total",
        "process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"}) {
    const auto found = values.find(series);
    ASSERT_NE(found, values.end()) << series;
    EXPECT_GT(found->second, 0) << series;
  }
  EXPECT_NEAR(values.at("process_start_time_seconds"), absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()), 600);
}

TEST_F(MetricsTest, M05_TheSeriesDoNotDependOnSessionsOrTraffic) {
  StartServer();
  const size_t before = AllMetrics().size();
  for (int i = 0; i < 50; ++i) {
    const std::string id = Create();
    Mean(id, {1, 2});
    Mean(id, {3});
    if (i % 2 == 0) Close(id);
  }
  MeanError("label\"injection\nattempt", {1});
  EXPECT_EQ(AllMetrics().size(), before);
}

TEST_F(MetricsTest, M01_EveryCallIsCountedOnceAndNoGaugeSticks) {
  StartServer();
  const std::string id = Create();
  std::atomic<bool> stop{false};
  std::thread scraper([&] {
    while (!stop.load()) {
      const std::map<std::string, double> values = AllMetrics();
      for (const char* gauge : {"attnd_requests_in_flight", "attnd_streams_active", "attnd_queue_depth",
                                "attnd_sessions_active", "attnd_kv_cache_used_bytes"}) {
        EXPECT_GE(values.at(gauge), 0) << gauge;
      }
      EXPECT_LE(values.at("attnd_kv_cache_used_bytes"), values.at("attnd_kv_cache_reserved_bytes"));
      EXPECT_LE(values.at("attnd_kv_cache_reserved_bytes"), values.at("attnd_kv_cache_capacity_bytes"));
    }
  });
  constexpr int kEach = 10;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int i = 0; i < kEach; ++i) {
    Mean(id, {1});                                       // OK
    MeanError(id, {nan});                                // INVALID_ARGUMENT
    MeanError("00000000000000000000000000000000", {1});  // NOT_FOUND
    gate_.Close();
    CancelStep(id, [&] { gate_.AwaitBatch(); });  // cancelled while it is computed
    ASSERT_TRUE(WaitForMetric("attnd_requests_in_flight", 0)) << "before compute is done";
    gate_.Open();
    ASSERT_TRUE(WaitForMetric("attnd_queue_depth", 0));
    grpc::ClientContext late;  // past its deadline in the queue or in compute
    late.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
    gate_.Close();
    v1::StepResponse response;
    EXPECT_EQ(stub_->Step(&late, MeanStep(id, {1}), &response).error_code(), StatusCode::DEADLINE_EXCEEDED);
    ASSERT_TRUE(WaitForMetric("attnd_requests_in_flight", 0)) << "the server knows too";
    gate_.Open();
  }
  EXPECT_TRUE(WaitForMetric("attnd_requests_in_flight", 0));
  EXPECT_TRUE(WaitForMetric("attnd_queue_depth", 0));
  stop.store(true);
  scraper.join();
  EXPECT_TRUE(Eventually([&] { return SumOfHandled("Step") == 5 * kEach; })) << SumOfHandled("Step");
  EXPECT_EQ(Handled("Step", "OK"), kEach);
  EXPECT_EQ(Handled("Step", "INVALID_ARGUMENT"), kEach);
  EXPECT_EQ(Handled("Step", "NOT_FOUND"), kEach);
  EXPECT_EQ(Handled("Step", "CANCELLED") + Handled("Step", "DEADLINE_EXCEEDED"), 2 * kEach);
  EXPECT_EQ(Metric("attnd_rpc_duration_seconds_count{method=\"Step\"}"), 5 * kEach);
  EXPECT_EQ(Metric("attnd_rejected_total{reason=\"NOT_FINITE\"}"), kEach);
  EXPECT_EQ(Metric("attnd_rejected_total{reason=\"NEVER_EXISTED\"}"), kEach);
  EXPECT_EQ(Get(id).length(), kEach);
}

TEST_F(MetricsTest, M02_CancelledStepsAreCountedAndTheirTokensAreNot) {
  StartServer();
  const std::string id = Create();
  for (int i = 0; i < 5; ++i) {
    gate_.Close();
    grpc::ClientContext context;
    std::thread canceller([&] {
      gate_.AwaitBatch();
      context.TryCancel();
    });
    v1::StepResponse response;
    EXPECT_EQ(stub_->Step(&context, MeanStep(id, Floats(600, 1)), &response).error_code(), StatusCode::CANCELLED);
    canceller.join();
    // The client knows first; the gate stays closed until the server does.
    EXPECT_TRUE(Eventually([&] { return Handled("Step", "CANCELLED") == i + 1; }));
    gate_.Open();
  }
  EXPECT_EQ(Metric("attnd_rpc_duration_seconds_count{method=\"Step\"}"), 5);
  EXPECT_TRUE(Eventually([&] {
    return Metric("attnd_cancelled_total{stage=\"computing\"}") + Metric("attnd_cancelled_total{stage=\"queued\"}") ==
           5;
  }));
  EXPECT_EQ(Metric("attnd_tokens_total{phase=\"prefill\"}"), 0);
  EXPECT_EQ(Get(id).length(), 0);
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), 0);
}

TEST_F(MetricsTest, M03_TheCacheGaugesFollowTheSessions) {
  StartServer();
  EXPECT_EQ(Metric("attnd_kv_cache_tokens"), 0);
  const std::string id = Create();
  Mean(id, Floats(10, 1));
  EXPECT_EQ(Metric("attnd_kv_cache_tokens"), 10);
  const double used = Metric("attnd_kv_cache_used_bytes");
  EXPECT_EQ(used, static_cast<double>(Get(id).used_bytes()));
  EXPECT_GT(used, 0);
  Mean(id, Floats(64, 1));
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), 2 * used) << "a second block";
  grpc::ClientContext context;
  v1::RewindSessionRequest rewind;
  rewind.set_session_id(id);
  rewind.set_length(4);
  v1::Session session;
  ASSERT_TRUE(stub_->RewindSession(&context, rewind, &session).ok());
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), used);
  EXPECT_EQ(Metric("attnd_kv_cache_tokens"), 4);
  MeanError(id, {std::numeric_limits<float>::infinity()});
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), used);
  Close(id);
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), 0);
  EXPECT_EQ(Metric("attnd_kv_cache_reserved_bytes"), 0);
  EXPECT_EQ(Metric("attnd_kv_cache_tokens"), 0);
  EXPECT_EQ(Metric("attnd_sessions_created_total{origin=\"create\"}"), 1);
  EXPECT_EQ(Metric("attnd_sessions_closed_total{reason=\"closed\"}"), 1);
}

TEST_F(MetricsTest, StepsAreCountedByPhase) {
  StartServer();
  const std::string id = Create();
  Mean(id, Floats(100, 1));
  Mean(id, {1});
  Mean(id, {1});
  EXPECT_EQ(Metric("attnd_tokens_total{phase=\"prefill\"}"), 100);
  EXPECT_EQ(Metric("attnd_tokens_total{phase=\"decode\"}"), 2);
  EXPECT_EQ(Metric("attnd_step_duration_seconds_count{phase=\"prefill\"}"), 1);
  EXPECT_EQ(Metric("attnd_step_duration_seconds_count{phase=\"decode\"}"), 2);
  EXPECT_GT(Metric("attnd_step_duration_seconds_sum{phase=\"decode\"}"), 0);
  EXPECT_GE(Metric("attnd_batch_tokens_sum"), 102);
  EXPECT_GT(Metric("attnd_kv_read_bytes_total"), 0);
}

TEST_F(MetricsTest, M09_BucketsSpanTenMicrosecondsToAMinute) {
  StartServer();
  std::set<double> bounds;
  for (const auto& [series, value] : AllMetrics()) {
    if (!absl::StrContains(series, "_bucket{")) continue;
    if (!absl::StartsWith(series, "attnd_step_duration_seconds_bucket{phase=\"decode\"")) continue;
    const std::string bound = series.substr(series.find("le=\"") + 4);
    bounds.insert(std::strtod(bound.c_str(), nullptr));
  }
  EXPECT_EQ(*bounds.begin(), 1e-5);
  EXPECT_TRUE(bounds.contains(60));
  EXPECT_TRUE(std::isinf(*bounds.rbegin()));
  EXPECT_EQ(bounds.size(), 23u);
}

TEST_F(MetricsTest, M11_AScrapeDoesNotWaitForCompute) {
  Options options = DefaultOptions();
  options.metrics_listen = "127.0.0.1:0";
  StartServer(options);
  const std::string address = server_->metrics_address();
  const std::string id = Create();
  gate_.Close();
  std::thread running([&] { Mean(id, {1}); });
  gate_.AwaitBatch();
  for (int i = 0; i < 5; ++i) {
    const absl::Time start = absl::Now();
    const std::string answer = HttpGet(address, "/metrics");
    EXPECT_LT(absl::Now() - start, absl::Milliseconds(500));  // 100 ms with room for a loaded machine and sanitizers
    EXPECT_TRUE(absl::StrContains(answer, "200 OK"));
    EXPECT_TRUE(absl::StrContains(answer, "\nattnd_requests_in_flight 1\n"));
    EXPECT_TRUE(absl::StrContains(answer, "\nattnd_build_info{"));
  }
  gate_.Open();
  running.join();
}

// With civetweb's defaults two connections that say nothing make the target look down for 30 s.
TEST_F(MetricsTest, ConnectionsThatSayNothingDoNotHoldUpScrapes) {
  Options options = DefaultOptions();
  options.metrics_listen = "127.0.0.1:0";
  StartServer(options);
  const std::string address = server_->metrics_address();
  std::vector<int> silent;
  for (int i = 0; i < 4; ++i) silent.push_back(HttpConnect(address));
  const absl::Time start = absl::Now();
  EXPECT_TRUE(absl::StrContains(HttpGet(address, "/metrics"), "200 OK"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  for (const int connection : silent) close(connection);
}

TEST_F(MetricsTest, TheReferenceTableIsThatOfTheBinary) {
  std::ifstream file(ATTND_SOURCE_DIR "/deploy/METRICS.md");
  std::stringstream text;
  text << file.rdbuf();
  const std::string reference = Metrics(BuildInfo{}).Reference();
  EXPECT_TRUE(absl::StrContains(text.str(), reference))
      << "deploy/METRICS.md must hold what `attnd --metrics_reference` prints:\n"
      << reference;
}

}  // namespace
}  // namespace attnd::testing

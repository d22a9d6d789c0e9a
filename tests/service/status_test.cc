// What the metrics address serves beside /metrics: the page, its data, and the answers for those who watch the server.
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/engine/engine.h"
#include "tests/service/harness.h"
#include "tests/service/http_get.h"

namespace attnd::testing {
namespace {

const std::vector<std::string> kPaths = {"/", "/metrics", "/status.json", "/healthz", "/readyz", "/nothing"};

class StatusTest : public ServiceTest {
 protected:
  static Options WithPort() {
    Options options = DefaultOptions();
    options.metrics_listen = "127.0.0.1:0";
    return options;
  }

  std::string Body(const std::string& path) { return HttpBody(HttpGet(server_->metrics_address(), path)); }

  google::protobuf::Struct Status() {
    google::protobuf::Struct status;
    const std::string text = Body("/status.json");
    EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(text, &status).ok()) << text;
    return status;
  }

  // Value of "cache.used_bytes"; fails the test where there is none.
  static double Number(const google::protobuf::Struct& status, absl::string_view path) {
    const google::protobuf::Struct* object = &status;
    const std::vector<std::string> names = absl::StrSplit(path, '.');
    for (size_t i = 0; i < names.size(); ++i) {
      const auto field = object->fields().find(names[i]);
      if (field == object->fields().end()) break;
      if (i + 1 == names.size()) return field->second.number_value();
      object = &field->second.struct_value();
    }
    ADD_FAILURE() << "no " << path;
    return -1;
  }

  // The sum of a family's series whose labels hold `label`.
  double Sum(absl::string_view family, absl::string_view label) {
    double sum = 0;
    for (const auto& [series, value] : AllMetrics()) {
      if (absl::StartsWith(series, absl::StrCat(family, "{")) && absl::StrContains(series, label)) sum += value;
    }
    return sum;
  }

  // The middle one of several: a machine that is busy with other things is no fault of the server.
  absl::Duration TimeToGet(const std::string& path) {
    std::vector<absl::Duration> times;
    for (int i = 0; i < 9; ++i) {
      const absl::Time start = absl::Now();
      EXPECT_TRUE(absl::StrContains(HttpGet(server_->metrics_address(), path), "200 OK"));
      times.push_back(absl::Now() - start);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
};

TEST_F(StatusTest, TheStatusSaysWhatTheMetricsSay) {
  StartServer(WithPort());
  std::vector<std::string> ids;
  for (int i = 0; i < 5; ++i) {
    ids.push_back(Create());
    Mean(ids.back(), Floats(100, 1));
    Mean(ids.back(), {1});
    Mean(ids.back(), {1});
  }
  Close(ids.back());
  MeanError("00000000000000000000000000000000", {1});
  MeanError("no id", {1});
  ASSERT_TRUE(WaitForMetric("attnd_requests_in_flight", 0));
  const google::protobuf::Struct status = Status();
  for (const auto& [path, series] : std::vector<std::pair<std::string, std::string>>{
           {"sessions.active", "attnd_sessions_active"},
           {"sessions.limit", "attnd_sessions_limit"},
           {"sessions.spilled", "attnd_sessions_spilled"},
           {"sessions.created.fork", "attnd_sessions_created_total{origin=\"fork\"}"},
           {"sessions.evictions.dropped", "attnd_kv_cache_evictions_total{reason=\"dropped\"}"},
           {"sessions.evictions.spilled", "attnd_kv_cache_evictions_total{reason=\"spilled\"}"},
           {"snapshots.spill.count", "attnd_snapshot_duration_seconds_count{op=\"spill\"}"},
           {"snapshots.spill.bytes", "attnd_snapshot_bytes_total{op=\"spill\"}"},
           {"snapshots.restore.failures", "attnd_snapshot_failures_total{op=\"restore\"}"},
           {"sessions.created.create", "attnd_sessions_created_total{origin=\"create\"}"},
           {"sessions.closed.closed", "attnd_sessions_closed_total{reason=\"closed\"}"},
           {"cache.capacity_bytes", "attnd_kv_cache_capacity_bytes"},
           {"cache.reserved_bytes", "attnd_kv_cache_reserved_bytes"},
           {"cache.used_bytes", "attnd_kv_cache_used_bytes"},
           {"cache.shared_bytes", "attnd_kv_cache_shared_bytes"},
           {"cache.spilled_bytes", "attnd_kv_cache_spilled_bytes"},
           {"cache.tokens", "attnd_kv_cache_tokens"},
           {"cache.read_bytes", "attnd_kv_read_bytes_total"},
           {"queue.depth", "attnd_queue_depth"},
           {"queue.limit", "attnd_queue_limit"},
           {"queue.tokens", "attnd_queue_tokens"},
           {"queue.tokens_limit", "attnd_queue_tokens_limit"},
           {"requests.in_flight", "attnd_requests_in_flight"},
           {"requests.in_flight_bytes", "attnd_inflight_bytes"},
           {"requests.in_flight_bytes_limit", "attnd_inflight_bytes_limit"},
           {"requests.streams_limit", "attnd_streams_limit"},
           {"requests.connections_refused", "attnd_connections_refused_total"},
           {"process.memory_limit_bytes", "attnd_memory_limit_bytes"},
           {"requests.streams", "attnd_streams_active"},
           {"requests.rejected.NEVER_EXISTED", "attnd_rejected_total{reason=\"NEVER_EXISTED\"}"},
           {"requests.rejected.BAD_SESSION_ID", "attnd_rejected_total{reason=\"BAD_SESSION_ID\"}"},
           {"requests.cancelled.queued", "attnd_cancelled_total{stage=\"queued\"}"},
           {"phases.prefill.tokens", "attnd_tokens_total{phase=\"prefill\"}"},
           {"phases.decode.tokens", "attnd_tokens_total{phase=\"decode\"}"},
           {"phases.decode.step.count", "attnd_step_duration_seconds_count{phase=\"decode\"}"},
           {"phases.decode.step.sum_seconds", "attnd_step_duration_seconds_sum{phase=\"decode\"}"},
           {"phases.prefill.queue.count", "attnd_queue_duration_seconds_count{phase=\"prefill\"}"},
           {"phases.prefill.compute.sum_seconds", "attnd_compute_duration_seconds_sum{phase=\"prefill\"}"},
           {"process.max_fds", "process_max_fds"},
       }) {
    const double expected = Metric(series);
    // The text of /metrics has fewer digits.
    EXPECT_NEAR(Number(status, path), expected, 1e-6 * expected) << path;
  }
  EXPECT_EQ(Number(status, "sessions.active"), 4);
  EXPECT_EQ(Number(status, "phases.prefill.tokens"), 500);
  for (const char* code : {"OK", "NOT_FOUND", "INVALID_ARGUMENT"}) {
    EXPECT_EQ(Number(status, absl::StrCat("requests.handled.", code)),
              Sum("attnd_rpc_handled_total", absl::StrCat("code=\"", code, "\"")))
        << code;
  }
  EXPECT_EQ(Number(status, "build.compute_threads"), 2);
  EXPECT_TRUE(status.fields().at("ready").bool_value());
  EXPECT_FALSE(status.fields().at("draining").bool_value());
  EXPECT_EQ(status.fields().at("build").struct_value().fields().at("version").string_value(), "0.1.0");
}

TEST_F(StatusTest, TheBucketsAreThoseOfTheHistograms) {
  StartServer(WithPort());
  const std::string id = Create();
  for (int i = 0; i < 20; ++i) Mean(id, {1});
  const google::protobuf::Struct status = Status();
  const auto& bounds = status.fields().at("bucket_bounds_seconds").list_value();
  const auto& step =
      status.fields().at("phases").struct_value().fields().at("decode").struct_value().fields().at("step");
  const auto& buckets = step.struct_value().fields().at("buckets").list_value();
  ASSERT_EQ(bounds.values_size(), 22);
  ASSERT_EQ(buckets.values_size(), 23);
  std::map<double, double> scraped;  // by bound
  for (const auto& [series, value] : AllMetrics()) {
    if (!absl::StartsWith(series, "attnd_step_duration_seconds_bucket{phase=\"decode\"")) continue;
    scraped[std::strtod(series.c_str() + series.find("le=\"") + 4, nullptr)] = value;
  }
  int i = 0;
  for (const auto& [bound, value] : scraped) {
    if (i < bounds.values_size()) {
      EXPECT_EQ(bounds.values(i).number_value(), bound);
    }
    EXPECT_EQ(buckets.values(i).number_value(), value) << "up to " << bound;
    ++i;
  }
  EXPECT_EQ(buckets.values(22).number_value(), 20);
}

TEST_F(StatusTest, NothingThatIsServedHoldsASessionId) {
  StartServer(WithPort());
  const std::string id = Create();
  Mean(id, {1, 2, 3});
  MeanError("0123456789abcdef0123456789abcdef", {1});
  for (const std::string& path : kPaths) {
    const std::string answer = HttpGet(server_->metrics_address(), path);
    EXPECT_FALSE(answer.empty());
    EXPECT_FALSE(absl::StrContains(answer, id)) << path;
    EXPECT_FALSE(absl::StrContains(answer, "0123456789abcdef0123456789abcdef")) << path;
  }
}

TEST_F(StatusTest, EachPathHasItsTypeAndNothingMayBeStoredOrGuessed) {
  StartServer(WithPort());
  for (const auto& [path, type] :
       std::vector<std::pair<std::string, std::string>>{{"/", "text/html; charset=utf-8"},
                                                        {"/?from=bookmark", "text/html; charset=utf-8"},
                                                        {"/metrics", "text/plain; version=0.0.4; charset=utf-8"},
                                                        {"/status.json", "application/json"},
                                                        {"/healthz", "text/plain; charset=utf-8"}}) {
    const std::string answer = HttpGet(server_->metrics_address(), path);
    EXPECT_TRUE(absl::StartsWith(answer, "HTTP/1.1 200 OK\r\n")) << path;
    for (const std::string& header :
         {absl::StrCat("Content-Type: ", type), std::string("X-Content-Type-Options: nosniff"),
          std::string("Cache-Control: no-store"), std::string("Content-Security-Policy: default-src 'none'"),
          absl::StrCat("Content-Length: ", HttpBody(answer).size(), "\r\n")}) {
      EXPECT_TRUE(absl::StrContains(answer, "\r\n" + header)) << path << ": " << header;
    }
  }
  const std::string page = HttpGet(server_->metrics_address(), "/");
  EXPECT_LT(page.size(), 40u << 10);
  EXPECT_FALSE(absl::StrContains(page, "unsafe-inline"));
  // Relative, so that the page also works behind a proxy that adds a folder; from nowhere else.
  EXPECT_TRUE(absl::StrContains(page, "fetch('status.json'"));
  EXPECT_FALSE(absl::StrContains(HttpBody(page), "<link rel=\"stylesheet\""));
  EXPECT_FALSE(absl::StrContains(HttpBody(page), "<script src"));
}

TEST_F(StatusTest, UnknownPathsAndMethodsAreAnsweredProperly) {
  StartServer(WithPort());
  const std::string address = server_->metrics_address();
  for (const char* path : {"/nothing", "/metrics/more", "/status", "/../etc/passwd", "/%2e%2e/etc/passwd"}) {
    const std::string answer = HttpGet(address, path);
    EXPECT_FALSE(absl::StartsWith(answer, "HTTP/1.1 200")) << path;
    EXPECT_FALSE(absl::StrContains(answer, "root:")) << path;
  }
  const std::string unknown = HttpGet(address, "/nothing");
  EXPECT_TRUE(absl::StartsWith(unknown, "HTTP/1.1 404 Not Found\r\n")) << unknown;
  for (const char* path : {"/metrics", "/status.json", "/healthz", "/readyz"}) {
    EXPECT_TRUE(absl::StrContains(HttpBody(unknown), path)) << unknown;
  }
  for (const char* method : {"POST", "PUT", "DELETE", "OPTIONS"}) {
    const std::string answer = HttpExchange(address, absl::StrCat(method, " /metrics HTTP/1.0\r\nContent-Length: 0"));
    EXPECT_TRUE(absl::StartsWith(answer, "HTTP/1.1 405 Method Not Allowed\r\n")) << method << ": " << answer;
    EXPECT_TRUE(absl::StrContains(answer, "\r\nAllow: GET, HEAD\r\n")) << answer;
  }
}

TEST_F(StatusTest, HeadIsAnsweredWithoutABody) {
  StartServer(WithPort());
  const std::string answer = HttpExchange(server_->metrics_address(), "HEAD / HTTP/1.0");
  EXPECT_TRUE(absl::StartsWith(answer, "HTTP/1.1 200 OK\r\n")) << answer;
  EXPECT_TRUE(absl::StrContains(answer, absl::StrCat("Content-Length: ", Body("/").size(), "\r\n"))) << answer;
  EXPECT_EQ(HttpBody(answer), "");
}

TEST_F(StatusTest, LongAnswersArePackedForThoseWhoAsk) {
  StartServer(WithPort());
  const std::string address = server_->metrics_address();
  const std::string packed = HttpExchange(address, "GET /metrics HTTP/1.0\r\nAccept-Encoding: deflate, gzip");
  EXPECT_TRUE(absl::StrContains(packed, "\r\nContent-Encoding: gzip\r\n"));
  EXPECT_LT(5 * HttpBody(packed).size(), Body("/metrics").size());
  EXPECT_EQ(HttpBody(packed).substr(0, 2), "\x1f\x8b");
  EXPECT_FALSE(absl::StrContains(HttpGet(address, "/metrics"), "Content-Encoding"));
}

TEST_F(StatusTest, ADrainingServerIsHealthyAndNotReady) {
  StartServer(WithPort());
  EXPECT_EQ(Body("/readyz"), "ready\n");
  EXPECT_EQ(Body("/healthz"), "ok\n");
  const std::string id = Create();
  gate_.Close();
  std::thread running([&] { Mean(id, {1}); });
  gate_.AwaitBatch();
  std::thread draining([&] { EXPECT_TRUE(server_->Drain()); });
  EXPECT_TRUE(Eventually([&] { return Body("/readyz") == "draining\n"; }));
  EXPECT_TRUE(absl::StartsWith(HttpGet(server_->metrics_address(), "/readyz"), "HTTP/1.1 503 Service Unavailable\r\n"));
  EXPECT_EQ(Body("/healthz"), "ok\n");
  EXPECT_TRUE(Status().fields().at("draining").bool_value());
  EXPECT_FALSE(Status().fields().at("ready").bool_value());
  EXPECT_EQ(Number(Status(), "requests.in_flight"), 1);
  gate_.Open();
  running.join();
  draining.join();
}

TEST_F(StatusTest, TenThousandSessionsAddNoSeriesAndNoTime) {
  StartServer(WithPort());
  const size_t series = AllMetrics().size();
  const size_t status_bytes = Body("/status.json").size();
  SessionConfig config;
  config.num_layers = 1;
  config.heads = {.num_q_heads = 1, .num_kv_heads = 1};
  config.shape = {.head_dim = 1, .value_dim = 1, .dtype = KvDType::kF32};
  config.softmax_scale = 1;
  config.layer_windows = {0};
  constexpr int kSessions = 10000;
  for (int i = 0; i < kSessions; ++i) {
    absl::Notification created;
    server_->engine().CreateSession(config, [&](absl::StatusOr<SessionInfo> session) {
      EXPECT_TRUE(session.ok()) << session.status();
      created.Notify();
    });
    created.WaitForNotification();
  }
  EXPECT_EQ(Metric("attnd_sessions_active"), kSessions);
  EXPECT_EQ(AllMetrics().size(), series);
  EXPECT_EQ(Number(Status(), "sessions.active"), kSessions);
  EXPECT_LT(Body("/status.json").size(), status_bytes + 100) << "more digits, no more fields";
  for (const char* path : {"/metrics", "/status.json", "/"}) {
    const absl::Duration time = TimeToGet(path);
    EXPECT_LT(time, absl::Milliseconds(50)) << path;
    RecordProperty(absl::StrCat("microseconds_of", path), static_cast<int>(absl::ToInt64Microseconds(time)));
    std::cout << path << " with " << kSessions << " sessions: " << time << "\n";
  }
}

}  // namespace
}  // namespace attnd::testing

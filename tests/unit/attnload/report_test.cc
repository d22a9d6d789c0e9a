// What is judged, and that the reports hold it.
#include "client/attnload/report.h"

#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <cmath>

#include "absl/strings/match.h"
#include "client/attnload/json.h"

namespace attnd::attnload {
namespace {

using google::protobuf::Struct;
using google::protobuf::Value;
using std::chrono::milliseconds;

Struct Parse(const std::string& json) {
  Struct parsed;
  const auto status = google::protobuf::util::JsonStringToMessage(json, &parsed);
  EXPECT_TRUE(status.ok()) << status.ToString() << "\n" << json;
  return parsed;
}

// "latency.decode.latency.p99_s"
const Value& Find(const Struct& root, const std::string& path) {
  const size_t dot = path.find('/');
  const auto field = root.fields().find(path.substr(0, dot));
  EXPECT_TRUE(field != root.fields().end()) << path;
  if (field == root.fields().end()) return Value::default_instance();
  return dot == std::string::npos ? field->second : Find(field->second.struct_value(), path.substr(dot + 1));
}
double Number(const Struct& root, const std::string& path) { return Find(root, path).number_value(); }

// A run of 1000 decodes of 1 to 1000 ms and a rejected one.
RunReport MakeReport() {
  const TimePoint start = Clock::now();
  Recorder recorder(start, start, start + std::chrono::hours(1));
  for (int i = 1; i <= 1000; ++i) {
    CallRecord call = {.kind = CallKind::kDecode, .tokens = 1, .queue = Nanos(1000), .compute = Nanos(2000)};
    call.intended = start + milliseconds(i);
    call.ready = call.intended + milliseconds(i / 10);
    call.sent = call.ready + milliseconds(i / 10);
    call.answered = call.intended + milliseconds(i);
    recorder.Call(call);
  }
  recorder.Call({.kind = CallKind::kDecode,
                 .intended = start,
                 .ready = start,
                 .sent = start,
                 .answered = start + milliseconds(2),
                 .status = absl::ResourceExhaustedError("full")});
  CheckOutcome right;
  right.rows = 8;
  recorder.Check(CheckKind::kConstant, "s", 1, right);
  RunReport report;
  report.config = {{"rate", "7"}, {"target", "a \"quoted\" </script> name"}};
  report.target = "127.0.0.1:1";
  report.model = "gpt2";
  report.load.plan.config.num_layers = 1;
  report.load.rate = 7;
  report.measured_seconds = 2;
  report.elapsed_seconds = 2;
  report.results = recorder.Get();
  report.metrics = {{-0.1, {{"attnd_sessions_active", 0}, {"attnd_step_duration_seconds_sum", 3}}},
                    {1.0, {{"attnd_sessions_active", 5}, {"process_cpu_seconds_total", 2}}}};
  report.findings = Judge({0.5, 0.01}, report.results);
  return report;
}

TEST(ReportTest, JsonHasTheFigures) {
  const Struct json = Parse(JsonReport(MakeReport(), nullptr));
  EXPECT_EQ(Number(json, "latency/decode/latency/count"), 1000);
  EXPECT_NEAR(Number(json, "latency/decode/latency/p50_s"), 0.5, 0.002);
  EXPECT_NEAR(Number(json, "latency/decode/latency/p99_s"), 0.99, 0.004);
  EXPECT_NEAR(Number(json, "latency/decode/latency/p99.99_s"), 1.0, 1e-9);
  EXPECT_NEAR(Number(json, "latency/decode/latency/max_s"), 1.0, 1e-9);
  EXPECT_NEAR(Number(json, "latency/decode/client_wait/max_s"), 0.1, 1e-9);
  EXPECT_NEAR(Number(json, "latency/decode/dependency_wait/max_s"), 0.1, 1e-9);
  EXPECT_NEAR(Number(json, "latency/decode/service/max_s"), 0.801, 1e-9);
  EXPECT_EQ(Number(json, "latency/decode/rejected/count"), 1);
  EXPECT_NEAR(Number(json, "latency/decode/rejected/max_s"), 0.002, 1e-9);
  EXPECT_EQ(Number(json, "errors/RESOURCE_EXHAUSTED"), 1);
  EXPECT_EQ(Number(json, "checks/constant_rows"), 8);
  EXPECT_EQ(Number(json, "throughput/steps_per_s"), 500);
  EXPECT_EQ(Find(json, "config/target").string_value(), "a \"quoted\" </script> name");
  EXPECT_EQ(Find(json, "server_metrics/attnd_sessions_active").list_value().values(1).number_value(), 5);
  EXPECT_EQ(Find(json, "server_metrics/process_cpu_seconds_total").list_value().values(0).kind_case(),
            Value::kNullValue);
  EXPECT_FALSE(Find(json, "server_metrics").struct_value().fields().contains("attnd_step_duration_seconds_sum"));
  EXPECT_EQ(Find(json, "seconds/steps").list_value().values_size(),
            Find(json, "seconds/decode_p99_s").list_value().values_size());
  EXPECT_FALSE(Find(json, "ok").bool_value());  // the objective of 500 ms
}

TEST(ReportTest, TheCurveReachesAsFarAsTheSamplesDo) {
  const Struct json = Parse(JsonReport(MakeReport(), nullptr));
  const auto& curve = Find(json, "percentile_curves/decode").list_value();
  ASSERT_EQ(curve.values_size(), 31);  // the start, ten points for each of 90, 99, 99.9
  double last = 0;
  for (const Value& point : curve.values()) {
    EXPECT_GE(point.list_value().values(1).number_value(), last);
    last = point.list_value().values(1).number_value();
  }
  EXPECT_NEAR(last, 1, 0.01);
}

TEST(ReportTest, ThePageHoldsTheDataAndNothingFromElsewhere) {
  const std::string json = JsonReport(MakeReport(), nullptr);
  const std::string page = HtmlReport(json);
  EXPECT_TRUE(absl::StrContains(page, json));
  EXPECT_FALSE(absl::StrContains(page, "ATTNLOAD_DATA"));
  EXPECT_FALSE(absl::StrContains(json, "</script>"));  // it would end the element that it stands in
  // But for the name of SVG's elements, nothing that a browser would fetch.
  for (const char* outside : {"src=", "href", "@import", "url(", "fetch(", "<link"}) {
    EXPECT_FALSE(absl::StrContains(page, outside)) << outside;
  }
}

TEST(ReportTest, TheSummaryNamesWhatFailed) {
  const std::string text = TextReport(MakeReport());
  EXPECT_TRUE(absl::StrContains(text, "FAILED    latency: decode p99"));
  EXPECT_TRUE(absl::StrContains(text, "1 x RESOURCE_EXHAUSTED"));
}

TEST(ReportTest, CapacityIsTold) {
  CapacityResult capacity;
  capacity.trials = {{.rate = 10, .ok = true, .p99_seconds = 0.02}, {.rate = 20, .ok = false, .why = "latency"}};
  capacity.rate = 10;
  capacity.bounded = true;
  const Struct json = Parse(JsonReport(MakeReport(), &capacity));
  EXPECT_EQ(Number(json, "capacity/sessions_per_s"), 10);
  EXPECT_EQ(Find(json, "capacity/trials").list_value().values_size(), 2);
  EXPECT_TRUE(absl::StrContains(CapacityTable(capacity), "missed: latency"));
  EXPECT_TRUE(absl::StrContains(CapacityTable(capacity), "capacity  10 sessions/s"));
}

std::string Failed(const Objectives& objectives, const Results& results) {
  std::string names;
  for (const Finding& f : Judge(objectives, results)) names += f.ok ? "" : f.name + " ";
  return names;
}

TEST(JudgeTest, EachObjectiveFailsByItself) {
  Results results = MakeReport().results;
  EXPECT_EQ(Failed({1.0, 0.01}, results), "");
  EXPECT_EQ(Failed({0.9, 0.01}, results), "latency ");
  EXPECT_EQ(Failed({1.0, 0.0001}, results), "errors ");
  results.checks.wrong = 1;
  EXPECT_EQ(Failed({1.0, 0.01}, results), "answers ");
  EXPECT_EQ(Failed({1.0, 0.01}, Results()), "load latency ");
}

TEST(JudgeTest, UncheckedAnswersAreNoSuccess) {
  Results results = MakeReport().results;
  results.checks = {};
  EXPECT_EQ(Failed({0, 0.01}, results), "answers ");
}

TEST(MetricsTest, SamplesAreSummedOverTheirLabels) {
  const MetricValues values = ParseMetrics(
      "# HELP a b\n# TYPE a counter\na{x=\"1\"} 2\na{x=\"2\",y=\"with space\"} 3.5\nb 7 1700000000\n"
      "h_bucket{le=\"1\"} 9\nh_sum 4\n\nbroken\n");
  EXPECT_EQ(values, (MetricValues{{"a", 5.5}, {"b", 7}, {"h_sum", 4}}));
}

TEST(JsonWriterTest, WhatIsNoNumberIsNull) {
  JsonWriter json;
  json.BeginObject().Field("a", std::nan("")).Field("b", true).Field("c", "x\n\"\\").Key("d").BeginArray();
  json.Value(1).Value(0.25).BeginObject().EndObject().EndArray().EndObject();
  EXPECT_EQ(json.text(), R"({"a":null,"b":true,"c":"x\u000a\"\\","d":[1,0.25,{}]})");
}

}  // namespace
}  // namespace attnd::attnload

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <set>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/attnload/json.h"
#include "client/attnload/report.h"

namespace attnd::attnload {
namespace {

void WriteHistogram(const Histogram& h, JsonWriter* json) {
  json->BeginObject().Field("count", h.count());
  if (h.count() > 0) {
    json->Field("mean_s", h.MeanSeconds()).Field("min_s", ToSeconds(h.min()));
    for (const NamedQuantile& q : kQuantiles) {
      json->Field(absl::StrCat(q.name, "_s"), ToSeconds(h.Quantile(q.quantile)));
    }
    json->Field("max_s", ToSeconds(h.max()));
  }
  json->EndObject();
}

void WriteCalls(const Results& results, JsonWriter* json) {
  json->Key("latency").BeginObject();
  json->Key("first_output").BeginObject().Key("latency");
  WriteHistogram(results.first_output, json);
  json->EndObject();
  for (size_t i = 0; i < kCallKinds; ++i) {
    const CallFigures& f = results.calls[i];
    json->Key(Name(static_cast<CallKind>(i))).BeginObject();
    json->Field("failed", f.failed).Field("cancelled", f.cancelled);
    const struct {
      const char* name;
      const Histogram& histogram;
    } parts[] = {{"latency", f.latency},         {"dependency_wait", f.dependency_wait},
                 {"client_wait", f.client_wait}, {"service", f.service},
                 {"server_queue", f.queue},      {"server_compute", f.compute},
                 {"outside_server", f.outside},  {"rejected", f.rejected}};
    for (const auto& part : parts) {
      json->Key(part.name);
      WriteHistogram(part.histogram, json);
    }
    json->EndObject();
  }
  json->EndObject();
}

// [[share not exceeded, seconds], ...] down to one sample in a million, ten points for each power of ten.
void WriteCurve(const char* name, const Histogram& h, JsonWriter* json) {
  if (h.count() == 0) return;
  json->Key(name).BeginArray();
  double tail = 1;
  for (int i = 0; i <= 60 && tail * static_cast<double>(h.count()) >= 1; ++i, tail = std::pow(10.0, -i / 10.0)) {
    json->BeginArray().Value(1 - tail).Value(ToSeconds(h.Quantile(1 - tail))).EndArray();
  }
  json->EndArray();
}

template <class Number>
void WriteColumn(const char* name, const std::vector<Second>& seconds, Number number, JsonWriter* json) {
  json->Key(name).BeginArray();
  for (const Second& second : seconds) json->Value(number(second));
  json->EndArray();
}

// Null where the second has no sample.
void WriteQuantiles(const char* name, const std::vector<Second>& seconds, Histogram Second::* histogram,
                    double quantile, JsonWriter* json) {
  WriteColumn(
      name, seconds,
      [&](const Second& second) {
        const Histogram& h = second.*histogram;
        return h.count() == 0 ? std::nan("") : ToSeconds(h.Quantile(quantile));
      },
      json);
}

void WriteSeconds(const std::vector<Second>& seconds, JsonWriter* json) {
  json->Key("seconds").BeginObject();
  WriteQuantiles("decode_p50_s", seconds, &Second::step, 0.5, json);
  WriteQuantiles("decode_p99_s", seconds, &Second::step, 0.99, json);
  WriteQuantiles("first_output_p50_s", seconds, &Second::first_output, 0.5, json);
  WriteQuantiles("first_output_p99_s", seconds, &Second::first_output, 0.99, json);
  WriteQuantiles("client_wait_p50_s", seconds, &Second::client_wait, 0.5, json);
  WriteQuantiles("client_wait_p99_s", seconds, &Second::client_wait, 0.99, json);
  WriteColumn("steps", seconds, [](const Second& s) { return s.steps; }, json);
  WriteColumn("tokens", seconds, [](const Second& s) { return s.tokens; }, json);
  WriteColumn("sessions", seconds, [](const Second& s) { return s.sessions; }, json);
  WriteColumn("rejected", seconds, [](const Second& s) { return s.rejected; }, json);
  WriteColumn("failed", seconds, [](const Second& s) { return s.failed; }, json);
  json->EndObject();
}

// One column for each metric that attnd or its process has; sums and counts of histograms are not shown anywhere.
void WriteMetrics(const std::vector<MetricSample>& samples, JsonWriter* json) {
  std::set<std::string> names;
  for (const MetricSample& sample : samples) {
    for (const auto& [name, value] : sample.values) {
      const bool ours = absl::StartsWith(name, "attnd_") || absl::StartsWith(name, "process_");
      if (ours && !absl::EndsWith(name, "_sum") && !absl::EndsWith(name, "_count")) names.insert(name);
    }
  }
  json->Key("server_metrics").BeginObject().Key("t").BeginArray();
  for (const MetricSample& sample : samples) json->Value(sample.seconds);
  json->EndArray();
  for (const std::string& name : names) {
    json->Key(name).BeginArray();
    for (const MetricSample& sample : samples) {
      const auto value = sample.values.find(name);
      json->Value(value == sample.values.end() ? std::nan("") : value->second);
    }
    json->EndArray();
  }
  json->EndObject();
}

void WriteServer(const RunReport& report, JsonWriter* json) {
  const client::ServerInfo& server = report.server;
  json->Key("server").BeginObject().Field("target", report.target).Field("version", server.version);
  json->Field("isa", server.isa).Field("onednn_version", server.onednn_version);
  json->Field("compute_threads", server.compute_threads).Field("max_sessions", server.max_sessions);
  json->Field("max_queue_tokens", server.max_queue_tokens);
  json->Field("kv_cache_capacity_bytes", server.kv_cache_capacity_bytes).EndObject();
}

void WriteConfig(const RunReport& report, JsonWriter* json) {
  json->Key("config").BeginObject();
  for (const auto& [name, value] : report.config) json->Field(name, value);
  json->EndObject();
  json->Key("load").BeginObject().Field("model", report.model).Field("rate", report.load.rate);
  json->Field("prefill_tokens", report.load.plan.prefill_tokens);
  json->Field("prefill_chunk", report.load.plan.prefill_chunk);
  json->Field("decode_tokens", report.load.plan.decode_tokens);
  json->Field("warmup_s", ToSeconds(report.load.warmup)).Field("measured_s", report.measured_seconds).EndObject();
}

void WriteCounts(const RunReport& report, JsonWriter* json) {
  const Results& r = report.results;
  json->Key("sessions").BeginObject().Field("arrived", r.sessions.arrived).Field("completed", r.sessions.completed);
  json->Field("cut", r.sessions.cut).Field("abandoned", r.sessions.abandoned).Field("failed", r.sessions.failed);
  json->Field("most_at_once", r.sessions.most_at_once).EndObject();
  const double seconds = std::max(report.measured_seconds, 1e-9);
  json->Key("throughput").BeginObject();
  json->Field("steps_per_s", static_cast<double>(r.measured_steps) / seconds);
  json->Field("tokens_per_s", static_cast<double>(r.measured_tokens) / seconds).EndObject();
  json->Key("errors").BeginObject();
  for (const auto& [name, count] : r.errors) json->Field(name, count);
  json->EndObject();
  const CheckFigures& checks = r.checks;
  json->Key("checks").BeginObject().Field("constant_rows", checks.constant_rows);
  json->Field("reference_rows", checks.reference_rows).Field("skipped", checks.skipped);
  json->Field("wrong", checks.wrong).Field("max_relative_error", checks.max_error).Key("mismatches").BeginArray();
  for (const std::string& mismatch : checks.mismatches) json->Value(mismatch);
  json->EndArray().EndObject();
}

void WriteVerdict(const RunReport& report, JsonWriter* json) {
  json->Field("ok", report.ok()).Field("stopped", report.stopped).Key("findings").BeginArray();
  for (const Finding& f : report.findings) {
    json->BeginObject().Field("name", f.name).Field("ok", f.ok).Field("text", f.text).EndObject();
  }
  json->EndArray().Key("warnings").BeginArray();
  for (const std::string& warning : report.warnings) json->Value(warning);
  json->EndArray();
}

void WriteCapacity(const CapacityResult& capacity, JsonWriter* json) {
  json->Key("capacity").BeginObject().Field("sessions_per_s", capacity.rate).Field("bounded", capacity.bounded);
  json->Key("trials").BeginArray();
  for (const Trial& t : capacity.trials) {
    json->BeginObject().Field("sessions_per_s", t.rate).Field("ok", t.ok).Field("p99_s", t.p99_seconds);
    json->Field("error_rate", t.error_rate).Field("steps_per_s", t.steps_per_second).Field("why", t.why).EndObject();
  }
  json->EndArray().EndObject();
}

}  // namespace

std::string JsonReport(const RunReport& report, const CapacityResult* capacity) {
  JsonWriter json;
  json.BeginObject().Field("format", "attnload/1").Field("attnload_version", ATTNLOAD_VERSION);
  json.Field("started", absl::FormatTime(absl::RFC3339_sec, report.started, absl::UTCTimeZone()));
  json.Field("elapsed_s", report.elapsed_seconds).Field("client_cpu_s", report.client_cpu_seconds);
  WriteVerdict(report, &json);
  WriteConfig(report, &json);
  WriteServer(report, &json);
  WriteCounts(report, &json);
  WriteCalls(report.results, &json);
  json.Key("percentile_curves").BeginObject();
  WriteCurve("decode", report.results.of(CallKind::kDecode).latency, &json);
  WriteCurve("decode_service", report.results.of(CallKind::kDecode).service, &json);
  WriteCurve("prefill", report.results.of(CallKind::kPrefill).latency, &json);
  WriteCurve("first_output", report.results.first_output, &json);
  json.EndObject();
  WriteSeconds(report.results.seconds, &json);
  WriteMetrics(report.metrics, &json);
  if (capacity != nullptr) WriteCapacity(*capacity, &json);
  return json.EndObject().text() + "\n";
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  if (path == "-") {
    std::cout << text;
    return absl::OkStatus();
  }
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write '", path, "'"));
}

}  // namespace attnd::attnload

#include "server/status_json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace attnd {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

// Writes one object, its fields in the order of the calls. Names are plain words, chosen here or by metrics.cc.
class JsonWriter {
 public:
  void Begin(absl::string_view name = "") {
    Name(name);
    text_ += '{';
    first_ = true;
  }
  void End() {
    text_ += '}';
    first_ = false;
  }
  void Number(absl::string_view name, double value) {
    Name(name);
    AppendNumber(value);
  }
  void Boolean(absl::string_view name, bool value) {
    Name(name);
    text_ += value ? "true" : "false";
  }
  void String(absl::string_view name, absl::string_view value) {
    Name(name);
    text_ += '"';
    for (const char c : value) {
      if (c == '"' || c == '\\') text_ += '\\';
      if (static_cast<unsigned char>(c) >= 0x20) text_ += c;
    }
    text_ += '"';
  }
  void Numbers(absl::string_view name, const std::vector<double>& values) {
    Name(name);
    text_ += '[';
    for (size_t i = 0; i < values.size(); ++i) {
      if (i > 0) text_ += ',';
      AppendNumber(values[i]);
    }
    text_ += ']';
  }
  const std::string& text() const { return text_; }

 private:
  void Name(absl::string_view name) {
    if (!first_) text_ += ',';
    first_ = false;
    if (!name.empty()) absl::StrAppend(&text_, "\"", name, "\":");
  }
  void AppendNumber(double value) {
    if (!std::isfinite(value)) {
      text_ += "null";
      return;
    }
    char digits[32];
    const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;  // the shortest that reads back equal
    text_.append(digits, end);
  }

  std::string text_;
  bool first_ = true;
};

absl::string_view LabelOf(const ClientMetric& metric, absl::string_view name) {
  for (const ClientMetric::Label& label : metric.label) {
    if (label.name == name) return label.value;
  }
  return "";
}

class StatusWriter {
 public:
  StatusWriter(const std::vector<MetricFamily>& families, JsonWriter* json) : families_(families), json_(*json) {}

  // The sum over a family's series; 0 when there is no such family.
  double Value(absl::string_view family) const {
    double sum = 0;
    for (const auto& [label, value] : ByLabel(family, "")) sum += value;
    return sum;
  }

  void Field(absl::string_view field, absl::string_view family) { json_.Number(field, Value(family)); }

  // An object with a field for each value of the label, summed over the other labels.
  void Object(absl::string_view field, absl::string_view family, absl::string_view label) {
    json_.Begin(field);
    for (const auto& [value_of_label, value] : ByLabel(family, label)) json_.Number(value_of_label, value);
    json_.End();
  }

  void Build(int compute_threads) {
    json_.Begin("build");
    if (const MetricFamily* build = Find("attnd_build_info"); build != nullptr && !build->metric.empty()) {
      for (const char* label : {"version", "isa", "onednn"}) json_.String(label, LabelOf(build->metric[0], label));
    }
    json_.Number("compute_threads", compute_threads);
    json_.End();
  }

  void Histogram(absl::string_view field, absl::string_view family, absl::string_view phase) {
    const MetricFamily* found = Find(family);
    if (found == nullptr) return;
    for (const ClientMetric& metric : found->metric) {
      if (LabelOf(metric, "phase") != phase) continue;
      std::vector<double> counts;
      for (const auto& bucket : metric.histogram.bucket) counts.push_back(static_cast<double>(bucket.cumulative_count));
      json_.Begin(field);
      json_.Number("count", static_cast<double>(metric.histogram.sample_count));
      json_.Number("sum_seconds", metric.histogram.sample_sum);
      json_.Numbers("buckets", counts);
      json_.End();
    }
  }

  // The upper bounds of the buckets; the last, infinity, is left out: JSON has no word for it.
  void Bounds(absl::string_view field, absl::string_view family) {
    std::vector<double> bounds;
    if (const MetricFamily* found = Find(family); found != nullptr && !found->metric.empty()) {
      for (const auto& bucket : found->metric[0].histogram.bucket) {
        if (std::isfinite(bucket.upper_bound)) bounds.push_back(bucket.upper_bound);
      }
    }
    json_.Numbers(field, bounds);
  }

  void Phases() {
    Bounds("bucket_bounds_seconds", "attnd_step_duration_seconds");
    json_.Begin("phases");
    const Sums tokens = ByLabel("attnd_tokens_total", "phase");
    for (const char* phase : {"prefill", "decode"}) {
      json_.Begin(phase);
      json_.Number("tokens", Of(tokens, phase));
      Histogram("step", "attnd_step_duration_seconds", phase);
      Histogram("queue", "attnd_queue_duration_seconds", phase);
      Histogram("compute", "attnd_compute_duration_seconds", phase);
      json_.End();
    }
    json_.End();
  }

  void Sessions() {
    json_.Begin("sessions");
    Field("active", "attnd_sessions_active");
    Field("limit", "attnd_sessions_limit");
    Field("spilled", "attnd_sessions_spilled");
    Object("created", "attnd_sessions_created_total", "origin");
    Object("closed", "attnd_sessions_closed_total", "reason");
    Object("evictions", "attnd_kv_cache_evictions_total", "reason");
    json_.End();
  }

  void Cache() {
    json_.Begin("cache");
    Field("capacity_bytes", "attnd_kv_cache_capacity_bytes");
    Field("reserved_bytes", "attnd_kv_cache_reserved_bytes");
    Field("used_bytes", "attnd_kv_cache_used_bytes");
    Field("shared_bytes", "attnd_kv_cache_shared_bytes");
    Field("spilled_bytes", "attnd_kv_cache_spilled_bytes");
    Field("tokens", "attnd_kv_cache_tokens");
    Field("read_bytes", "attnd_kv_read_bytes_total");
    json_.End();
  }

  void Snapshots() {
    json_.Begin("snapshots");
    const Sums failures = ByLabel("attnd_snapshot_failures_total", "op");
    const Sums bytes = ByLabel("attnd_snapshot_bytes_total", "op");
    if (const MetricFamily* durations = Find("attnd_snapshot_duration_seconds"); durations != nullptr) {
      for (const ClientMetric& metric : durations->metric) {
        const absl::string_view op = LabelOf(metric, "op");
        json_.Begin(op);
        json_.Number("count", static_cast<double>(metric.histogram.sample_count));
        json_.Number("bytes", Of(bytes, op));
        json_.Number("failures", Of(failures, op));
        json_.End();
      }
    }
    json_.End();
  }

  void Queue() {
    json_.Begin("queue");
    Field("depth", "attnd_queue_depth");
    Field("limit", "attnd_queue_limit");
    Field("tokens", "attnd_queue_tokens");
    Field("tokens_limit", "attnd_queue_tokens_limit");
    json_.End();
  }

  void Requests() {
    json_.Begin("requests");
    Field("in_flight", "attnd_requests_in_flight");
    Field("in_flight_bytes", "attnd_inflight_bytes");
    Field("in_flight_bytes_limit", "attnd_inflight_bytes_limit");
    Field("streams", "attnd_streams_active");
    Field("streams_limit", "attnd_streams_limit");
    Field("connections_refused", "attnd_connections_refused_total");
    Object("handled", "attnd_rpc_handled_total", "code");
    Object("rejected", "attnd_rejected_total", "reason");
    Object("cancelled", "attnd_cancelled_total", "stage");
    json_.End();
  }

  void Process() {
    json_.Begin("process");
    Field("cpu_seconds", "process_cpu_seconds_total");
    Field("resident_bytes", "process_resident_memory_bytes");
    Field("memory_limit_bytes", "attnd_memory_limit_bytes");
    Field("threads", "process_threads");
    Field("open_fds", "process_open_fds");
    Field("max_fds", "process_max_fds");
    json_.End();
  }

 private:
  const MetricFamily* Find(absl::string_view name) const {
    const auto found = std::find_if(families_.begin(), families_.end(),
                                    [name](const MetricFamily& family) { return family.name == name; });
    return found == families_.end() ? nullptr : &*found;
  }

  using Sums = std::map<std::string, double, std::less<>>;

  static double Of(const Sums& sums, absl::string_view name) {
    const auto found = sums.find(name);
    return found == sums.end() ? 0 : found->second;
  }

  Sums ByLabel(absl::string_view family, absl::string_view label) const {
    Sums sums;
    const MetricFamily* found = Find(family);
    if (found == nullptr) return sums;
    for (const ClientMetric& metric : found->metric) {
      sums[std::string(LabelOf(metric, label))] +=
          found->type == MetricType::Counter ? metric.counter.value : metric.gauge.value;
    }
    return sums;
  }

  const std::vector<MetricFamily>& families_;
  JsonWriter& json_;
};

}  // namespace

std::string StatusJson(const std::vector<MetricFamily>& families, int compute_threads, absl::Time now) {
  JsonWriter json;
  StatusWriter status(families, &json);
  const double now_seconds = absl::ToDoubleSeconds(now - absl::UnixEpoch());
  const double start_seconds = status.Value("process_start_time_seconds");
  json.Begin();
  json.Number("time_seconds", now_seconds);
  json.Number("start_time_seconds", start_seconds);
  json.Number("uptime_seconds", std::max(0.0, now_seconds - start_seconds));
  json.Boolean("ready", status.Value("attnd_ready") == 1);
  json.Boolean("draining", status.Value("attnd_draining") == 1);
  status.Build(compute_threads);

  status.Sessions();
  status.Cache();
  status.Snapshots();
  status.Queue();
  status.Requests();
  status.Phases();
  status.Process();
  json.End();
  return json.text() + "\n";
}

}  // namespace attnd

#include "server/metrics.h"

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <array>
#include <map>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "server/metric_families.h"

namespace attnd {
namespace {

using Labels = std::map<std::string, std::string>;
using prometheus::Counter;
using prometheus::Gauge;
using prometheus::Histogram;

constexpr int kPhases = 2;
constexpr const char* kPhaseNames[kPhases] = {"prefill", "decode"};
constexpr int kStages = 2;
constexpr const char* kStageNames[kStages] = {"queued", "computing"};
constexpr int kMethods = static_cast<int>(std::size(kRpcMethodNames));
constexpr int kCodes = 17;  // of gRPC, 0..16
constexpr const char* kCloseReasons[] = {"closed", "expired", "evicted", "lost"};
constexpr const char* kOriginNames[] = {"create", "fork", "import", "restore"};
constexpr int kOrigins = static_cast<int>(std::size(kOriginNames));
constexpr const char* kEvictionNames[] = {"dropped", "spilled"};
constexpr int kEvictions = static_cast<int>(std::size(kEvictionNames));
constexpr const char* kSnapshotOpNames[] = {"export", "import", "spill", "restore", "drain"};
constexpr int kSnapshotOps = static_cast<int>(std::size(kSnapshotOpNames));
// Every reason of the wire contract. What is not among them is counted as "other": a series is never made at run time.
constexpr const char* kErrorReasons[] = {"BAD_CONFIG",    "BAD_PAGE",          "BAD_POSITION", "BAD_SESSION_ID",
                                         "BAD_SHAPE",     "BAD_SNAPSHOT",      "CACHE_FULL",   "CLOSED",
                                         "DRAINING",      "DUPLICATE_SESSION", "EMPTY_ROW",    "EVICTED",
                                         "EXPIRED",       "GRADIENT_OVERFLOW", "MALFORMED",    "MESSAGE_TOO_LARGE",
                                         "NEVER_EXISTED", "NOT_FINITE",        "QUEUE_FULL",   "SCORE_OVERFLOW",
                                         "SESSION_LIMIT", "SPILL_DAMAGED",     "STREAM_LIMIT", "TOKENS_FREED",
                                         "TOKEN_MISSING", "TOKEN_UNKNOWN",     "TOO_LONG",     "TOO_MANY_TOKENS",
                                         "other"};

const Histogram::BucketBoundaries& SecondsBuckets() {
  static const auto& buckets = *new Histogram::BucketBoundaries{
      1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 50, 60};
  return buckets;
}

const Histogram::BucketBoundaries& CountBuckets() {
  static const auto& buckets = *new Histogram::BucketBoundaries{1,   2,    5,    10,   20,    50,    100,   200,
                                                                500, 1000, 2000, 5000, 10000, 20000, 50000, 100000};
  return buckets;
}

}  // namespace

struct Metrics::State {
  prometheus::Registry registry;

  std::array<Histogram*, kPhases> step_seconds, queue_seconds, compute_seconds;
  std::array<Counter*, kPhases> tokens;
  std::array<std::array<Counter*, kCodes>, kMethods> handled;
  std::array<Histogram*, kMethods> rpc_seconds;
  std::array<Counter*, kStages> cancelled;
  std::map<std::string, Counter*, std::less<>> errors, closed;
  Histogram *batch_segments, *batch_tokens;
  Counter *kv_read_bytes, *connections_refused;
  std::array<Counter*, kOrigins> created;
  std::array<Counter*, kEvictions> evicted;
  std::array<Histogram*, kSnapshotOps> snapshot_seconds;
  std::array<Counter*, kSnapshotOps> snapshot_bytes, snapshot_failures;
  Gauge *requests_in_flight, *streams_active, *ready, *draining;

  mutable absl::Mutex mutex;
  const Engine* engine ABSL_GUARDED_BY(mutex) = nullptr;
  const AttentionService* service ABSL_GUARDED_BY(mutex) = nullptr;

  std::shared_ptr<prometheus::Collectable> collectable;

  Counter& AddCounter(const std::string& name, const std::string& help, const Labels& labels = {}) {
    return prometheus::BuildCounter().Name("attnd_" + name).Help(help).Register(registry).Add(labels);
  }
  Gauge& AddGauge(const std::string& name, const std::string& help, const Labels& labels = {}) {
    return prometheus::BuildGauge().Name("attnd_" + name).Help(help).Register(registry).Add(labels);
  }
  Histogram& AddHistogram(const std::string& name, const std::string& help, const Labels& labels,
                          const Histogram::BucketBoundaries& buckets) {
    return prometheus::BuildHistogram().Name("attnd_" + name).Help(help).Register(registry).Add(labels, buckets);
  }

  explicit State(const BuildInfo& build_info);
  void AddSteps();
  void AddRpcs();
  void AddSessions();
  void AddProcess(const BuildInfo& build_info);
};

namespace {

// What is scraped: the registry, and the gauges that are read at that moment.
class Collector final : public prometheus::Collectable {
 public:
  struct Stats {
    EngineStats engine;
    EdgeStats edge;
    bool evicts = false;
    std::string spill_dir;
  };
  using StatsReader = std::function<Stats()>;
  Collector(const prometheus::Registry* registry, StatsReader read_stats)
      : registry_(registry), read_stats_(std::move(read_stats)) {}

  std::vector<prometheus::MetricFamily> Collect() const override {
    std::vector<prometheus::MetricFamily> families = registry_->Collect();
    const Stats stats = read_stats_();
    AppendEngineFamilies(stats.engine, &families);
    AppendEdgeFamilies(stats.edge, &families);
    AppendEvictionFamilies(stats.evicts, stats.spill_dir, &families);
    AppendProcessFamilies(&families);
    return families;
  }

 private:
  const prometheus::Registry* const registry_;
  const StatsReader read_stats_;
};

}  // namespace

Metrics::State::State(const BuildInfo& build_info) {
  AddSteps();
  AddRpcs();
  AddSessions();
  AddProcess(build_info);
  collectable = std::make_shared<Collector>(&registry, [this] {
    // Held while the two are read, so that they cannot end meanwhile. Reading them waits for no computation.
    absl::MutexLock lock(&mutex);
    Collector::Stats stats;
    if (service != nullptr) stats.edge = service->stats();
    if (engine == nullptr) return stats;
    stats.engine = engine->stats();
    stats.evicts = engine->options().evict_lru;
    stats.spill_dir = engine->options().spill_dir;
    return stats;
  });
}

void Metrics::State::AddSteps() {
  for (int phase = 0; phase < kPhases; ++phase) {
    const Labels labels = {{"phase", kPhaseNames[phase]}};
    step_seconds[phase] = &AddHistogram(
        "step_duration_seconds", "Time of a step in the engine, from arrival to answer.", labels, SecondsBuckets());
    queue_seconds[phase] = &AddHistogram("queue_duration_seconds", "Time of a step from arrival to its first compute.",
                                         labels, SecondsBuckets());
    compute_seconds[phase] =
        &AddHistogram("compute_duration_seconds", "Time of a step in compute, all chunks.", labels, SecondsBuckets());
    tokens[phase] = &AddCounter("tokens_total", "Tokens of steps that were answered.", labels);
  }
  batch_segments = &AddHistogram("batch_segments", "Segments computed together.", {}, CountBuckets());
  batch_tokens = &AddHistogram("batch_tokens", "Tokens computed together.", {}, CountBuckets());
  kv_read_bytes = &AddCounter("kv_read_bytes_total", "Bytes of keys and values that attention read.");
  for (int stage = 0; stage < kStages; ++stage) {
    cancelled[stage] = &AddCounter("cancelled_total", "Requests dropped because their client was gone or out of time.",
                                   {{"stage", kStageNames[stage]}});
  }
}

void Metrics::State::AddRpcs() {
  for (int method = 0; method < kMethods; ++method) {
    const std::string name(kRpcMethodNames[method]);
    for (int code = 0; code < kCodes; ++code) {
      handled[method][code] =
          &AddCounter("rpc_handled_total", "RPCs that ended, each counted once.",
                      {{"method", name}, {"code", absl::StatusCodeToString(static_cast<absl::StatusCode>(code))}});
    }
    rpc_seconds[method] =
        &AddHistogram("rpc_duration_seconds", "Time of an RPC in the server.", {{"method", name}}, SecondsBuckets());
  }
  for (const char* reason : kErrorReasons) {
    errors[reason] = &AddCounter("rejected_total", "Errors that went to clients.", {{"reason", reason}});
  }
  requests_in_flight = &AddGauge("requests_in_flight", "Requests received and not yet answered.");
  connections_refused =
      &AddCounter("connections_refused_total", "Connections closed at once because as many were open as may be.");
  streams_active = &AddGauge("streams_active", "Open StepStream calls.");
}

void Metrics::State::AddSessions() {
  for (int origin = 0; origin < kOrigins; ++origin) {
    created[origin] = &AddCounter("sessions_created_total", "Sessions created.", {{"origin", kOriginNames[origin]}});
  }
  for (int kind = 0; kind < kEvictions; ++kind) {
    evicted[kind] =
        &AddCounter("kv_cache_evictions_total", "Idle sessions that made room for others: dropped, or moved to disk.",
                    {{"reason", kEvictionNames[kind]}});
  }
  for (int op = 0; op < kSnapshotOps; ++op) {
    const Labels labels = {{"op", kSnapshotOpNames[op]}};
    snapshot_seconds[op] =
        &AddHistogram("snapshot_duration_seconds", "Time to write or read a whole session.", labels, SecondsBuckets());
    snapshot_bytes[op] = &AddCounter("snapshot_bytes_total", "Bytes of sessions written or read whole.", labels);
    snapshot_failures[op] =
        &AddCounter("snapshot_failures_total", "Sessions that could not be written or read whole.", labels);
  }
  for (const char* reason : kCloseReasons) {
    closed[reason] = &AddCounter("sessions_closed_total", "Sessions that ended.", {{"reason", reason}});
  }
}

void Metrics::State::AddProcess(const BuildInfo& build_info) {
  AddGauge("build_info", "1, with what this binary is and computes with.",
           {{"version", build_info.version}, {"isa", build_info.isa}, {"onednn", build_info.onednn}})
      .Set(1);
  ready = &AddGauge("ready", "1 while the server takes new work.");
  draining = &AddGauge("draining", "1 while the server shuts down.");
}

Metrics::Metrics(const BuildInfo& build_info) : state_(std::make_unique<State>(build_info)) {}
Metrics::~Metrics() = default;

void Metrics::SetStatsSource(const Engine* engine, const AttentionService* service) {
  absl::MutexLock lock(&state_->mutex);
  state_->engine = engine;
  state_->service = service;
}

void Metrics::SetReady(bool ready) { state_->ready->Set(ready ? 1 : 0); }
void Metrics::SetDraining(bool draining) { state_->draining->Set(draining ? 1 : 0); }
bool Metrics::ready() const { return state_->ready->Value() == 1; }
bool Metrics::draining() const { return state_->draining->Value() == 1; }

const std::shared_ptr<prometheus::Collectable>& Metrics::collectable() const { return state_->collectable; }

std::string Metrics::Text() const { return prometheus::TextSerializer().Serialize(state_->collectable->Collect()); }

void Metrics::OnStepDone(Phase phase, int64_t tokens, absl::Duration total, absl::Duration queue,
                         absl::Duration compute) {
  const int i = static_cast<int>(phase);
  state_->step_seconds[i]->Observe(absl::ToDoubleSeconds(total));
  state_->queue_seconds[i]->Observe(absl::ToDoubleSeconds(queue));
  state_->compute_seconds[i]->Observe(absl::ToDoubleSeconds(compute));
  state_->tokens[i]->Increment(static_cast<double>(tokens));
}

void Metrics::OnBatch(int segments, int64_t tokens, int64_t kv_bytes_read) {
  state_->batch_segments->Observe(segments);
  state_->batch_tokens->Observe(static_cast<double>(tokens));
  state_->kv_read_bytes->Increment(static_cast<double>(kv_bytes_read));
}

void Metrics::OnCancelled(CancelStage stage) { state_->cancelled[static_cast<int>(stage)]->Increment(); }

void Metrics::OnSessionCreated(Origin origin) { state_->created[static_cast<int>(origin)]->Increment(); }

void Metrics::OnEvicted(Eviction kind) { state_->evicted[static_cast<int>(kind)]->Increment(); }

void Metrics::OnSnapshot(SnapshotOp op, int64_t bytes, absl::Duration duration) {
  state_->snapshot_seconds[static_cast<int>(op)]->Observe(absl::ToDoubleSeconds(duration));
  state_->snapshot_bytes[static_cast<int>(op)]->Increment(static_cast<double>(bytes));
}

void Metrics::OnSnapshotFailed(SnapshotOp op) { state_->snapshot_failures[static_cast<int>(op)]->Increment(); }

void Metrics::OnSessionClosed(absl::string_view reason) {
  const auto counter = state_->closed.find(reason);
  if (counter != state_->closed.end()) counter->second->Increment();
}

void Metrics::OnHandled(RpcMethod method, absl::StatusCode code, absl::Duration duration) {
  const int known_code = static_cast<int>(code) < kCodes ? static_cast<int>(code) : 2;  // UNKNOWN
  state_->handled[static_cast<int>(method)][known_code]->Increment();
  state_->rpc_seconds[static_cast<int>(method)]->Observe(absl::ToDoubleSeconds(duration));
}

void Metrics::OnError(absl::string_view reason) {
  if (reason == "CANCELLED" || reason == "DEADLINE_EXCEEDED") return;  // cancelled_total has them
  auto counter = state_->errors.find(reason);
  if (counter == state_->errors.end()) counter = state_->errors.find("other");
  counter->second->Increment();
}

void Metrics::OnRequestsInFlight(int delta) { state_->requests_in_flight->Increment(delta); }
void Metrics::OnConnectionRefused() { state_->connections_refused->Increment(); }
void Metrics::OnStreamsActive(int delta) { state_->streams_active->Increment(delta); }

std::string Metrics::Reference() const {
  std::map<std::string, std::string> rows;
  for (const prometheus::MetricFamily& family : state_->collectable->Collect()) {
    std::set<std::string> labels;
    for (const auto& metric : family.metric) {
      for (const auto& label : metric.label) labels.insert("`" + label.name + "`");
    }
    const char* type = family.type == prometheus::MetricType::Counter     ? "counter"
                       : family.type == prometheus::MetricType::Histogram ? "histogram"
                                                                          : "gauge";
    rows[family.name] =
        absl::StrCat("| `", family.name, "` | ", type, " | ", absl::StrJoin(labels, ", "), " | ", family.help, " |\n");
  }
  std::string table = "| metric | type | labels | what it is |\n| --- | --- | --- | --- |\n";
  for (const auto& [name, row] : rows) table += row;
  return table;
}

}  // namespace attnd

#include "client/attnload/run.h"

#include <sys/resource.h>

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "client/attnload/progress.h"

namespace attnd::attnload {
namespace {

double CpuSeconds() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// Elements of the widest tensor of the largest step.
int64_t LongestTensor(const PlanOptions& plan) {
  const client::SessionConfig& c = plan.config;
  const int64_t row = std::max<int64_t>(int64_t{c.num_q_heads} * c.head_dim,
                                        int64_t{c.num_kv_heads} * std::max(c.head_dim, c.value_dim_or_default()));
  return row * plan.prefill_chunk;
}

// The gauges that a load must leave as it found them.
constexpr const char* kGauges[] = {"attnd_sessions_active", "attnd_requests_in_flight", "attnd_queue_depth",
                                   "attnd_streams_active", "attnd_kv_cache_reserved_bytes"};

// Waits until no gauge is above its value from before the run; sessions that were left go when their time to live ends.
Finding CheckGauges(const std::string& url, const MetricValues& before, absl::Duration patience) {
  const absl::Time deadline = absl::Now() + patience;
  const absl::Time start = absl::Now();
  std::string above;
  while (true) {
    absl::StatusOr<MetricValues> now = ReadMetrics(url);
    above = now.ok() ? "" : absl::StrCat("the metrics page: ", now.status().message());
    for (const char* name : kGauges) {
      if (!now.ok() || !now->contains(name)) continue;
      const auto was = before.find(name);
      const double least = was == before.end() ? 0 : was->second;
      if (now->at(name) > least)
        absl::StrAppend(&above, above.empty() ? "" : ", ", name, " ", now->at(name), " > ", least);
    }
    if (above.empty() || absl::Now() >= deadline) break;
    absl::SleepFor(absl::Milliseconds(100));
  }
  const std::string after = absl::StrFormat("%.1f s", absl::ToDoubleSeconds(absl::Now() - start));
  if (above.empty()) return {"gauges", true, absl::StrCat("back where they were within ", after)};
  return {"gauges", false, absl::StrCat("not back after ", after, ": ", above)};
}

void WaitForEnd(Load* load, bool quiet, const std::atomic<bool>& interrupted) {
  Progress progress(quiet);
  TimePoint next = load->start() + std::chrono::seconds(1);
  bool stopped = false;
  while (!load->Wait(std::chrono::milliseconds(50))) {
    if (interrupted && !stopped) {
      load->Stop();
      stopped = true;
    }
    if (Clock::now() < next) continue;
    progress.Show(*load);
    next += std::chrono::seconds(1);
  }
}

}  // namespace

absl::StatusOr<RunReport> Run(const Flags& flags, double rate, bool quiet, const std::atomic<bool>& interrupted) {
  RunReport report;
  report.config = flags.Describe();
  report.target = flags.target();
  report.model = flags.model().Describe();
  absl::StatusOr<TargetOptions> target_options = flags.Target();
  if (!target_options.ok()) return target_options.status();
  Executor executor(static_cast<int>(flags.threads));
  absl::StatusOr<std::unique_ptr<Target>> target = Target::Connect(*target_options, &executor);
  if (!target.ok()) return target.status();
  absl::StatusOr<client::ServerInfo> server = (*target)->client().GetServerInfo();
  if (!server.ok()) return server.status();
  report.server = *server;
  report.load = flags.Load(std::min(server->max_message_bytes, target_options->client.max_message_bytes));
  report.load.rate = rate;

  const std::string metrics_url = flags.MetricsUrl();
  MetricValues before;
  if (!metrics_url.empty()) {
    absl::StatusOr<MetricValues> values = ReadMetrics(metrics_url);
    if (!values.ok()) return values.status();
    before = *std::move(values);
  }
  const TensorPool pool(report.load.plan.seed, LongestTensor(report.load.plan));
  {
    Load load(report.load, &pool, target->get(), &executor);
    Scraper scraper(metrics_url, load.start());
    const double cpu = CpuSeconds();
    report.started = absl::Now();
    load.Start();
    WaitForEnd(&load, quiet, interrupted);
    report.elapsed_seconds = ToSeconds(Clock::now() - load.start());
    report.client_cpu_seconds = CpuSeconds() - cpu;
    report.measured_seconds = std::max(0.0, ToSeconds(load.end() - load.start() - report.load.warmup));
    report.stopped = load.stopped();
    report.results = load.Finish();
    scraper.Finish();
    report.metrics = scraper.samples();
    report.metric_failures = scraper.failures();
    executor.Stop();
  }
  target->reset();
  report.findings = Judge({absl::ToDoubleSeconds(flags.slo_p99), flags.slo_error_rate}, report.results);
  if (!metrics_url.empty()) {
    const absl::Duration ttl = flags.has_abandons() ? flags.session_ttl : absl::ZeroDuration();
    report.findings.push_back(CheckGauges(metrics_url, before, absl::Seconds(10) + 2 * ttl));
  }
  report.warnings = Warn(report);
  return report;
}

}  // namespace attnd::attnload

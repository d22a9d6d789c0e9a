#include "client/attnload/options.h"

#include <algorithm>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/tool/metrics_page.h"

namespace attnd::attnload {
namespace {

constexpr char kSummary[] =
    "Puts an attnd server under open-loop load: sessions arrive by a schedule that is fixed before the run, each "
    "creates\n"
    "a session, sends its prefill, decodes token by token, and closes. Latencies count from when the schedule wanted "
    "a\n"
    "call sent, so a server that stalls cannot hide it; what a call waited inside attnload is told apart. Answers are\n"
    "checked. Exit status 0 only when every check passed and the objectives (--slo_p99, --slo_error_rate) were kept,\n"
    "1 when not, 2 when the command line was wrong.";

ArrivalKind ParseArrivals(const std::string& name) {
  if (name == "constant") return ArrivalKind::kConstant;
  return name == "ramp" ? ArrivalKind::kRamp : ArrivalKind::kPoisson;
}

}  // namespace

Flags::Flags()
    : threads(std::clamp<int64_t>(std::thread::hardware_concurrency(), 2, 4)),
      set_("attnload [FLAG...]", kSummary),
      connection_(&set_, "target", absl::Seconds(10)),
      model_(&set_, "llama3-8b", /*default_layers=*/1) {
  set_.Number("rate", &rate, 1e-6, 1e6, "sessions per second");
  set_.Choice("arrivals", &arrivals_, {"poisson", "constant", "ramp"},
              "how sessions arrive; ramp grows from 0 to --rate over warm-up and duration");
  set_.Seconds("duration", &duration_, "time that is measured");
  set_.Seconds("warmup", &warmup_, "load before that, which no figure counts", /*zero=*/true);
  set_.Int("prefill_tokens", &prefill_tokens_, 1, 1 << 24, "tokens of a session's prefill");
  set_.Int("prefill_chunk", &prefill_chunk_, 1, 1 << 24, "most tokens of one prefill step; fewer where a message ends");
  set_.Int("decode_tokens", &decode_tokens_, 0, 1 << 24, "tokens after it, one by one");
  set_.Seconds("decode_interval", &decode_interval_,
               "a session's pace: one token each; 0: the next step goes when the answer is there", /*zero=*/true);
  set_.Int("connections", &connections_, 1, 1024, "TCP connections, which sessions are spread over");
  set_.Int("streams", &streams_, 0, 1024, "StepStreams of each connection; 0: steps are unary calls");
  set_.Int("calls_per_connection", &calls_per_connection_, 1, 1 << 20,
           "most unary calls in flight on a connection; others wait here and are counted as client wait");
  set_.Int("steps_per_stream", &steps_per_stream_, 1, 1 << 20, "the same of steps on a stream");
  set_.Int("max_sessions", &max_sessions_, 1, 1 << 20, "most sessions at once; arrivals beyond it wait here");
  set_.Int("threads", &threads, 1, 256, "threads that build requests and look at answers");
  set_.Number("check_rate", &check_rate_, 0, 1,
              "share of sessions that are compared with float64; all others have a constant V, which every answer has "
              "to repeat");
  set_.Number("cancel_rate", &cancel_rate_, 0, 1, "share of steps cancelled in flight (and then sent again)");
  set_.Number("abandon_rate", &abandon_rate_, 0, 1, "share of sessions that vanish in the midst of a step");
  set_.Int("retries", &retries_, 0, 1000, "times that a rejected call is sent again, after the server's delay");
  set_.Seconds("session_ttl", &session_ttl, "idle time after which the server drops a session of ours");
  set_.Int("seed", &seed_, 0, int64_t{1} << 62, "of arrivals, data, checks and what goes wrong on purpose");
  set_.Seconds("slo_p99", &slo_p99,
               "the run fails when the decode latency's p99 (without decodes: that of the first output) is above; 0: "
               "no such objective",
               /*zero=*/true);
  set_.Number("slo_error_rate", &slo_error_rate, 0, 1,
              "the run fails when a larger share of calls fails or is rejected");
  set_.Switch("find_capacity", &find_capacity, "search the highest rate that keeps the objectives, from --rate on");
  set_.Seconds("trial_duration", &trial_duration, "what each rate of that search is held for, after the warm-up");
  set_.Number("max_rate", &max_rate, 1e-6, 1e6, "where that search ends");
  set_.String("metrics", &metrics_, "HOST:PORT or URL of the server's metrics page; read every second");
  set_.String("json", &json, "file for the results as JSON; - for standard output instead of the summary");
  set_.String("report", &report, "file for the report: one self-contained HTML page");
}

absl::Status Flags::Check() const {
  absl::StatusOr<client::SessionConfig> config = model_.Config();
  if (!config.ok()) return config.status();
  if (find_capacity && slo_p99 == absl::ZeroDuration()) {
    return absl::InvalidArgumentError("--find_capacity needs an objective: --slo_p99=50ms, for example");
  }
  if (find_capacity && max_rate < rate) {
    return absl::InvalidArgumentError(absl::StrCat("--max_rate: ", max_rate, " is below --rate ", rate));
  }
  if (find_capacity && arrivals_ == "ramp") {
    return absl::InvalidArgumentError("--arrivals: ramp has no one rate that --find_capacity could judge");
  }
  if (decode_interval_ * 2 > session_ttl) {
    return absl::InvalidArgumentError(absl::StrCat("--session_ttl: ", absl::FormatDuration(session_ttl),
                                                   " is less than two --decode_interval of ",
                                                   absl::FormatDuration(decode_interval_), ": sessions would expire"));
  }
  return absl::OkStatus();
}

LoadOptions Flags::Load(int64_t max_message_bytes) const {
  LoadOptions options;
  PlanOptions& plan = options.plan;
  plan.config = *model_.Config();
  plan.config.ttl = session_ttl;
  plan.prefill_tokens = prefill_tokens_;
  plan.decode_tokens = decode_tokens_;
  plan.check_rate = check_rate_;
  plan.cancel_rate = cancel_rate_;
  plan.abandon_rate = abandon_rate_;
  plan.seed = static_cast<uint64_t>(seed_);
  // A request, and an answer, of a chunk must fit into a message with room for what is around the tensors.
  const client::SessionConfig& c = plan.config;
  const int64_t request = c.num_q_heads * c.head_dim + c.num_kv_heads * (c.head_dim + c.value_dim_or_default());
  const int64_t answer = c.num_q_heads * c.value_dim_or_default();
  const int64_t token_bytes = 4 * std::max<int64_t>(request, answer);
  const int64_t fit = std::max<int64_t>(1, (max_message_bytes - 4096) / token_bytes);
  plan.prefill_chunk = std::min({prefill_chunk_, prefill_tokens_, fit});
  options.arrivals = ParseArrivals(arrivals_);
  options.rate = rate;
  options.warmup = ToNanos(warmup_);
  options.duration = ToNanos(find_capacity ? trial_duration : duration_);
  options.decode_interval = ToNanos(decode_interval_);
  options.max_sessions = max_sessions_;
  options.retries = retries_;
  return options;
}

absl::StatusOr<TargetOptions> Flags::Target() const {
  absl::StatusOr<client::ClientOptions> client = connection_.Options("attnload");
  if (!client.ok()) return client.status();
  TargetOptions options;
  options.client = *std::move(client);
  options.connections = static_cast<int>(connections_);
  options.streams = static_cast<int>(streams_);
  options.calls_per_connection = calls_per_connection_;
  options.steps_per_stream = steps_per_stream_;
  return options;
}

std::string Flags::MetricsUrl() const { return tool::MetricsUrl(metrics_); }

}  // namespace attnd::attnload

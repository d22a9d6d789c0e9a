// attnd_bench rpc: a one-token step against a real attnd on loopback, cache-resident, beside a bare gRPC echo of the
// same bytes in the same run, interleaved.
#include "tests/bench/rpc.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "client/cpp/client.h"
#include "tests/bench/cases.h"
#include "tests/bench/measure.h"
#include "tests/bench/modes.h"
#include "tests/bench/report.h"

namespace attnd::bench {
namespace {

void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "attnd_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}

// One layer of one session, filled up to the last token; each step rewrites that token in place (a replay), so that
// every measured step sees the same context.
class OneTokenStep {
 public:
  OneTokenStep(const Case& options, const std::string& address)
      : options_(options),
        client_(Connect(address)),
        session_(Create()),
        q_(Tensor(1, options.shape.num_q_heads)),
        k_(Tensor(1, options.shape.num_kv_heads)) {
    position_.start_position = options.tokens - 1;
    constexpr int64_t kChunk = 512;  // a message holds so many tokens of any shape
    for (int64_t first = 0; first < options.tokens; first += kChunk) {
      const std::vector<float> rows = Tensor(std::min(kChunk, options.tokens - first), options.shape.num_kv_heads);
      Check(session_.Step(0, {}, rows, rows).status());
    }
    stream_ = client_.OpenStepStream();
  }

  void Unary() { Keep(session_.Step(0, q_, k_, k_, position_)); }
  void Stream() {
    absl::StatusOr<uint64_t> id = stream_->Send(*session_.MakeStep(0, q_, k_, k_, position_));
    Check(id.status());
    Keep(stream_->Wait(*id));
  }

  // Medians of what the server says about its own part, in microseconds.
  double queue_us() { return Median(&queue_us_); }
  double compute_us() { return Median(&compute_us_); }

 private:
  static Client Connect(const std::string& address) {
    absl::StatusOr<Client> client = Client::Connect({.target = address});
    Check(client.status());
    return *client;
  }

  client::Session Create() {
    client::SessionConfig config;
    config.num_q_heads = options_.shape.num_q_heads;
    config.num_kv_heads = options_.shape.num_kv_heads;
    config.head_dim = options_.shape.head_dim;
    config.kv_dtype = *client::ParseKvDType(KvName(options_.kv));
    absl::StatusOr<client::Session> session = client_.CreateSession(config);
    Check(session.status());
    return *std::move(session);
  }

  std::vector<float> Tensor(int64_t tokens, int heads) const {
    std::vector<float> values(static_cast<size_t>(tokens * heads * options_.shape.head_dim));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 61) / 30 - 1;
    return values;
  }

  void Keep(const absl::StatusOr<client::StepResult>& result) {
    Check(result.status());
    queue_us_.push_back(absl::ToDoubleMicroseconds(result->queue_time));
    compute_us_.push_back(absl::ToDoubleMicroseconds(result->compute_time));
  }

  static double Median(std::vector<double>* values) {
    const auto middle = values->begin() + static_cast<std::ptrdiff_t>(values->size() / 2);
    std::nth_element(values->begin(), middle, values->end());
    return *middle;
  }

  const Case options_;
  const Client client_;
  const client::Session session_;
  const std::vector<float> q_, k_;
  client::StepOptions position_;
  std::unique_ptr<client::StepStream> stream_;
  std::vector<double> queue_us_, compute_us_;
};

void PrintRow(const Case& c, const std::string& name, double seconds, double roof_seconds) {
  Row row;
  row.name = name;
  row.median_us = seconds * 1e6;
  row.value = 1 / seconds;
  row.unit = "steps/s";
  row.roof = 1 / roof_seconds;
  row.bound = "echo";
  Print(c, row);
}

// Whether both processes came up.
bool RunCase(const Case& c) {
  const int64_t q_bytes = 4 * int64_t{c.shape.num_q_heads} * c.shape.head_dim;
  const int64_t k_bytes = 4 * int64_t{c.shape.num_kv_heads} * c.shape.head_dim;
  // What the message holds beside its tensors: the session's id, positions, timings, field headers.
  constexpr int64_t kRequestRest = 64, kAnswerRest = 32;
  const std::unique_ptr<ServingProcess> echo_server =
      ServingProcess::ForkEcho(static_cast<size_t>(q_bytes + kAnswerRest));
  const std::string attnd = std::filesystem::read_symlink("/proc/self/exe").replace_filename("attnd");
  const std::unique_ptr<ServingProcess> server =
      ServingProcess::Spawn(attnd, {"--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", "--kv_cache_bytes=1GiB",
                                    "--compute_threads=" + std::to_string(c.threads)});
  if (echo_server == nullptr || server == nullptr) return false;
  OneTokenStep step(c, server->address());
  EchoClient echo(echo_server->address(), static_cast<size_t>(q_bytes + 2 * k_bytes + kRequestRest));
  const std::vector<double> medians = MediansInterleaved(
      c.seconds, {[&] { step.Unary(); }, [&] { echo.Unary(); }, [&] { step.Stream(); }, [&] { echo.Stream(); }});
  PrintRow(c, "rpc_unary", medians[0], medians[1]);
  PrintRow(c, "echo_unary", medians[1], medians[1]);
  PrintRow(c, "rpc_stream", medians[2], medians[3]);
  PrintRow(c, "echo_stream", medians[3], medians[3]);
  if (!c.json) {
    std::printf("of a step, in the server: %.1f us waiting, %.1f us computing (medians)\n", step.queue_us(),
                step.compute_us());
  }
  return true;
}

}  // namespace

int RunRpc(const Options& options) {
  PrintHeading(options.json);
  bool all = true;
  // A process for each: the echo is forked, which is possible only until gRPC has started its threads.
  const bool possible =
      ForEachCase("rpc", options, [&](const Case& c) { all = RunInChild([&] { return RunCase(c); }) && all; });
  return all && possible ? 0 : 1;
}

}  // namespace attnd::bench

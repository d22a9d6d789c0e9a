// attnd_bench serve: a real attnd on loopback under two loads that matter to those who share it.
//
//   serve                --batch streams decode as fast as answers come. The roof is the kernel alone on as many
//                        sequences of as many tokens, in this process, in turns in the same run.
//   decode_idle          one session decodes 20 tokens a second, nothing else happens: p99 from the intended time.
//   decode_and_prefill   the same while other sessions prefill 8192 tokens, one after the other. Its limit (roof) is
//                        ten times the p99 of decode_idle and --prefill_chunk_time.
//
// The client's half of gRPC and the server's share the machine's cores with the kernel.
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "client/cpp/client.h"
#include "tests/bench/attend.h"
#include "tests/bench/cases.h"
#include "tests/bench/modes.h"
#include "tests/bench/report.h"
#include "tests/bench/served.h"

namespace attnd::bench {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The value that `part` of the values do not exceed.
double Quantile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  const size_t rank = std::min(values.size() - 1, static_cast<size_t>(part * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(rank), values.end());
  return values[rank];
}

// Processor time, of all its threads together, that a process (0: this one) has used, in seconds.
double CpuSeconds(pid_t pid) {
  clockid_t clock;
  timespec used;
  if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &used) != 0) return 0;
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

// Processor time of a step, over several rounds.
class CpuTime {
 public:
  explicit CpuTime(pid_t pid) : pid_(pid) {}

  void Begin() { begin_ = CpuSeconds(pid_); }
  void End(double steps) {
    seconds_ += CpuSeconds(pid_) - begin_;
    steps_ += steps;
  }
  double us_of_step() const { return 1e6 * seconds_ / steps_; }

 private:
  const pid_t pid_;
  double begin_ = 0, seconds_ = 0, steps_ = 0;
};

// A session of `tokens` tokens with a stream of its own, and the decode step that is sent on it again and again.
class Decoder {
 public:
  Decoder(const Case& c, const Client& client)
      : session_(CreateSession(c, client)),
        q_(TensorOf(c, 1, c.shape.num_q_heads)),
        k_(TensorOf(c, 1, c.shape.num_kv_heads)),
        stream_(client.OpenStepStream()),
        step_(*session_.MakeStep(0, q_, k_, k_)) {
    Fill(c, session_, c.tokens);
  }

  void Cut(int64_t tokens) { CheckOk(session_.Rewind(tokens).status()); }
  client::StepStream& stream() { return *stream_; }
  const client::StepRequest& step() const { return step_; }

 private:
  client::Session session_;
  const std::vector<float> q_, k_;
  const std::unique_ptr<client::StepStream> stream_;
  const client::StepRequest step_;
};

// Every decoder steps for `seconds`, each step as soon as the one before is answered. Returns steps per second; the
// server's compute times, in seconds, go to *compute.
double DecodeAll(const std::vector<std::unique_ptr<Decoder>>& decoders, double seconds, std::vector<double>* compute) {
  std::atomic<bool> stop{false};
  std::atomic<int64_t> steps{0};
  absl::Mutex mutex;
  absl::BlockingCounter running(static_cast<int>(decoders.size()));
  std::function<void(Decoder*)> send = [&](Decoder* decoder) {
    decoder->stream().SendAsync(decoder->step(),
                                [&, decoder](absl::StatusOr<client::StepResult> result, Clock::time_point) {
                                  CheckOk(result.status());
                                  if (!stop) ++steps;
                                  {
                                    absl::MutexLock lock(&mutex);
                                    compute->push_back(absl::ToDoubleSeconds(result->compute_time));
                                  }
                                  if (stop) return (void)running.DecrementCount();
                                  send(decoder);
                                });
  };
  const Clock::time_point start = Clock::now();
  for (const auto& decoder : decoders) send(decoder.get());
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  stop = true;
  const double rate = static_cast<double>(steps) / SecondsSince(start);
  running.Wait();
  return rate;
}

void MeasureStreams(const Case& c, const Client& client, pid_t server) {
  constexpr int kRounds = 5;
  std::vector<std::unique_ptr<Decoder>> decoders;
  for (int i = 0; i < c.batch; ++i) decoders.push_back(std::make_unique<Decoder>(c, client));
  Layers layers(c);
  AttendWorks kernel(c, &layers);
  const std::function<void()> attend = kernel.works()[0];
  std::vector<double> rates, kernel_rates, compute;
  CpuTime server_cpu(server), client_cpu(0), kernel_cpu(0);
  attend();
  for (int round = 0; round < kRounds; ++round) {
    const size_t answered = compute.size();
    server_cpu.Begin();
    client_cpu.Begin();
    rates.push_back(DecodeAll(decoders, c.seconds / kRounds, &compute));
    server_cpu.End(static_cast<double>(compute.size() - answered));
    client_cpu.End(static_cast<double>(compute.size() - answered));
    for (const auto& decoder : decoders) decoder->Cut(c.tokens);
    kernel_cpu.Begin();
    const Clock::time_point start = Clock::now();
    int batches = 0;
    do {
      attend();
      ++batches;
    } while (SecondsSince(start) < c.seconds / kRounds / 2);
    kernel_rates.push_back(batches * c.batch / SecondsSince(start));
    kernel_cpu.End(batches * c.batch);
  }
  Row row;
  row.name = "serve";
  row.value = Quantile(rates, 0.5);
  row.median_us = 1e6 * c.batch / row.value;
  row.unit = "steps/s";
  row.roof = Quantile(kernel_rates, 0.5);
  row.bound = "kernel";
  row.numbers = {{"step_us", 1e6 / row.roof},
                 {"compute_us", 1e6 * Quantile(compute, 0.5)},
                 {"kernel_cpu_us", kernel_cpu.us_of_step()},
                 {"server_cpu_us", server_cpu.us_of_step()},
                 {"client_cpu_us", client_cpu.us_of_step()}};
  Print(c, row);
}

// Of steps, in seconds: from the intended time to the answer, and of that in the server's queue and in its batches.
struct Latencies {
  std::vector<double> total, queue, compute;
};

// Steps that are intended every `period` seconds.
Latencies DecodeAtPace(Decoder* decoder, double seconds, double period) {
  Latencies latencies;
  const Clock::time_point start = Clock::now();
  for (int i = 0; i * period < seconds; ++i) {
    const auto intended =
        start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(i * period));
    std::this_thread::sleep_until(intended);
    absl::StatusOr<uint64_t> id = decoder->stream().Send(decoder->step());
    CheckOk(id.status());
    const absl::StatusOr<client::StepResult> result = decoder->stream().Wait(*id);
    CheckOk(result.status());
    latencies.total.push_back(SecondsSince(intended));
    latencies.queue.push_back(absl::ToDoubleSeconds(result->queue_time));
    latencies.compute.push_back(absl::ToDoubleSeconds(result->compute_time));
  }
  return latencies;
}

constexpr double kChunkSeconds = 0.005;

// Prefills sessions of 8192 tokens until it is stopped. Returns how many tokens a second.
double PrefillUntil(const Case& c, const Client& client, const std::atomic<bool>& stop) {
  constexpr int64_t kTokens = 8192, kMessageTokens = 1024;
  const std::vector<float> q = TensorOf(c, kMessageTokens, c.shape.num_q_heads);
  const std::vector<float> k = TensorOf(c, kMessageTokens, c.shape.num_kv_heads);
  int64_t tokens = 0;
  const Clock::time_point start = Clock::now();
  while (!stop) {
    client::Session session = CreateSession(c, client);
    const std::unique_ptr<client::StepStream> stream = client.OpenStepStream();
    std::vector<uint64_t> ids;
    for (int64_t first = 0; first < kTokens; first += kMessageTokens) {
      absl::StatusOr<uint64_t> id = stream->Send(*session.MakeStep(0, q, k, k));
      CheckOk(id.status());
      ids.push_back(*id);
    }
    for (const uint64_t id : ids) {
      CheckOk(stream->Wait(id).status());
      tokens += kMessageTokens;
    }
  }
  return static_cast<double>(tokens) / SecondsSince(start);
}

Row LatencyRow(const char* name, const Latencies& latencies) {
  Row row;
  row.name = name;
  row.median_us = 1e6 * Quantile(latencies.total, 0.5);
  row.value = 1e3 * Quantile(latencies.total, 0.99);
  row.unit = "ms p99";
  row.numbers = {{"queue_us", 1e6 * Quantile(latencies.queue, 0.5)},
                 {"compute_us", 1e6 * Quantile(latencies.compute, 0.5)}};
  return row;
}

void MeasurePrefillBeside(const Case& c, const Client& client, const Client& other) {
  constexpr double kPeriod = 0.05;
  Decoder decoder(c, client);
  DecodeAtPace(&decoder, 0.2, kPeriod);
  const Latencies idle = DecodeAtPace(&decoder, 3 * c.seconds, kPeriod);
  std::atomic<bool> stop{false};
  double prefill_rate = 0;
  std::thread prefills([&] { prefill_rate = PrefillUntil(c, other, stop); });
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  const Latencies busy = DecodeAtPace(&decoder, 3 * c.seconds, kPeriod);
  stop = true;
  prefills.join();
  Row idle_row = LatencyRow("decode_idle", idle);
  Row busy_row = LatencyRow("decode_and_prefill", busy);
  idle_row.roof = idle_row.value;
  idle_row.bound = "itself";
  busy_row.roof = 10 * idle_row.value + 1e3 * kChunkSeconds;
  busy_row.bound = "limit";
  busy_row.numbers.emplace_back("prefill_tokens_s", prefill_rate);
  Print(c, idle_row);
  Print(c, busy_row);
}

bool RunCase(const Case& c) {
  constexpr int64_t kGrowth = 4096;  // tokens that a decoder may add between two cuts
  const int64_t bytes = 2 * int64_t{c.batch} * (c.tokens + kGrowth) * 4 * 2 * c.shape.num_kv_heads * c.shape.head_dim;
  const std::unique_ptr<ServingProcess> server = SpawnAttnd(
      c, std::max<int64_t>(bytes, int64_t{1} << 30), {"--prefill_chunk_time=" + std::to_string(kChunkSeconds) + "s"});
  if (server == nullptr) return false;
  client::ClientOptions options;
  options.target = server->address();
  options.own_connection = true;
  absl::StatusOr<Client> client = Client::Connect(options), other = Client::Connect(options);
  CheckOk(client.status());
  CheckOk(other.status());
  MeasureStreams(c, *client, server->pid());
  MeasurePrefillBeside(c, *client, *other);
  return true;
}

}  // namespace

int RunServe(const Options& options) { return RunServed("serve", options, RunCase); }

}  // namespace attnd::bench

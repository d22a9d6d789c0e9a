#include "client/attnctl/demo.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/attnctl/demo_check.h"
#include "client/attnctl/demo_data.h"
#include "client/tool/stored.h"

namespace attnd::attnctl {
namespace {

constexpr int64_t kDecodeRoundTokens = 64;

// How long things take beside each other, for the progress bar alone: as measured on two cores, a step costs about two
// tokens beside its own, and checking them about three times as much as running them.
constexpr int64_t kCheckShare = 3;
int64_t Work(int64_t tokens, int64_t steps) { return tokens + 2 * steps; }

std::vector<float> MakeTensor(const DemoOptions& options, int64_t session, const DemoStep& step, TensorKind kind) {
  const client::SessionConfig& c = options.config;
  const int heads = kind == TensorKind::kQ ? c.num_q_heads : c.num_kv_heads;
  const int64_t row = int64_t{heads} * (kind == TensorKind::kV ? c.value_dim_or_default() : c.head_dim);
  std::vector<float> tensor(static_cast<size_t>(step.tokens * row));
  DemoData(options.seed, session, step.layer, kind).Fill(step.position * row, tensor);
  return tensor;
}

}  // namespace

// Inputs before the clock starts; answers and times after it.
struct Demo::Lane {
  std::vector<std::vector<float>> q, k, v;  // per step
  std::vector<client::Tensor> answers;      // per step
  std::vector<absl::Duration> latencies;    // per step
  int64_t waits = 0;
  absl::Status status;

  Lane(const DemoOptions& options, int64_t session, const std::vector<DemoStep>& steps) {
    for (const DemoStep& step : steps) {
      q.push_back(MakeTensor(options, session, step, TensorKind::kQ));
      k.push_back(MakeTensor(options, session, step, TensorKind::kK));
      v.push_back(MakeTensor(options, session, step, TensorKind::kV));
    }
  }

  absl::StatusOr<client::StepResult> Step(const Client& client, client::StepStream* stream,
                                          const client::StepRequest& request) {
    if (stream == nullptr) return client.Step(request);
    absl::StatusOr<uint64_t> id = stream->Send(request);
    if (!id.ok()) return id.status();
    return stream->Wait(*id);
  }

  // One step, again after the server's delay when its queue was full.
  absl::Status Answer(const Client& client, client::StepStream* stream, const client::StepRequest& request) {
    const absl::Time start = absl::Now();
    constexpr int kMostWaits = 1000;
    for (;;) {
      absl::StatusOr<client::StepResult> result = Step(client, stream, request);
      if (result.ok()) {
        latencies.push_back(absl::Now() - start);
        answers.push_back(std::move(result->out));
        return absl::OkStatus();
      }
      const auto delay = client::GetErrorDetails(result.status()).retry_delay;
      if (!absl::IsResourceExhausted(result.status()) || !delay || ++waits > kMostWaits) return result.status();
      absl::SleepFor(*delay);
    }
  }

  void Run(const Client& client, const client::Session& session, const std::vector<DemoStep>& steps, bool streaming,
           const std::atomic<bool>& stop, ProgressBar* bar) {
    std::unique_ptr<client::StepStream> stream = streaming ? client.OpenStepStream() : nullptr;
    for (size_t i = 0; i < steps.size() && status.ok() && !stop; ++i) {
      // The position is stated, so that the client may send a step again whose answer was lost.
      client::StepOptions step_options;
      step_options.start_position = steps[i].position;
      absl::StatusOr<client::StepRequest> request = session.MakeStep(steps[i].layer, q[i], k[i], v[i], step_options);
      status = request.ok() ? Answer(client, stream.get(), *request) : request.status();
      bar->Advance(Work(steps[i].tokens, 1));
    }
    if (stream != nullptr && status.ok() && !stop) status = stream->Finish();
  }
};

absl::Status Demo::OpenSessions() {
  for (int64_t i = 0; i < options_.sessions; ++i) {
    absl::StatusOr<client::Session> session = client_.CreateSession(options_.config);
    if (!session.ok()) return session.status();
    session->set_close_on_destroy(true);  // also when the run fails
    sessions_.push_back(*std::move(session));
  }
  return absl::OkStatus();
}

absl::Status Demo::CloseSessions() {
  for (client::Session& session : sessions_) {
    absl::StatusOr<bool> was_open = session.Close();
    if (!was_open.ok()) return was_open.status();
    session.set_close_on_destroy(false);
    if (!*was_open) return absl::DataLossError(absl::StrCat("session ", session.id(), " was not open at the end"));
  }
  return absl::OkStatus();
}

absl::Status Demo::Run(ProgressBar* bar) {
  const int layers = options_.config.num_layers;
  for (int64_t first = 0; first < options_.prefill; first += options_.prefill_chunk) {
    const int64_t tokens = std::min(options_.prefill_chunk, options_.prefill - first);
    for (int layer = 0; layer < layers; ++layer) {
      bar->SetLabel(absl::StrCat("prefill, layer ", layer + 1, " of ", layers));
      absl::Status status = RunRound({{layer, first, tokens}}, &prefill_, bar);
      if (!status.ok()) return status;
    }
  }
  for (int64_t first = 0; first < options_.decode; first += kDecodeRoundTokens) {
    bar->SetLabel("decode");
    std::vector<DemoStep> steps;
    for (int64_t t = first; t < std::min(first + kDecodeRoundTokens, options_.decode); ++t) {
      for (int layer = 0; layer < layers; ++layer) steps.push_back({layer, options_.prefill + t, 1});
    }
    absl::Status status = RunRound(steps, &decode_, bar);
    if (!status.ok()) return status;
  }
  prefill_.tokens = options_.sessions * options_.prefill;
  decode_.tokens = options_.sessions * options_.decode;
  return CheckLengths();
}

absl::Status Demo::RunRound(const std::vector<DemoStep>& steps, PhaseResult* phase, ProgressBar* bar) {
  std::vector<Lane> lanes;
  for (int64_t s = 0; s < options_.sessions; ++s) lanes.emplace_back(options_, s, steps);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  const absl::Time start = absl::Now();
  for (size_t s = 0; s < lanes.size(); ++s) {
    threads.emplace_back([&, s] {
      lanes[s].Run(client_, sessions_[s], steps, options_.stream, stop, bar);
      if (!lanes[s].status.ok()) stop = true;
    });
  }
  for (std::thread& thread : threads) thread.join();
  phase->time += absl::Now() - start;
  for (size_t s = 0; s < lanes.size(); ++s) {
    phase->latencies.insert(phase->latencies.end(), lanes[s].latencies.begin(), lanes[s].latencies.end());
    waits_ += lanes[s].waits;
    if (!lanes[s].status.ok()) return lanes[s].status;
  }
  const absl::Time check_start = absl::Now();
  CheckRound(steps, lanes, bar);
  check_time_ += absl::Now() - check_start;
  return absl::OkStatus();
}

void Demo::CheckRound(const std::vector<DemoStep>& steps, const std::vector<Lane>& lanes, ProgressBar* bar) {
  // A task is a kv head of a layer of a session: its keys are made once and serve all of the round's steps.
  std::vector<CheckTask> tasks;
  for (int64_t s = 0; s < options_.sessions; ++s) {
    for (int layer = 0; layer < options_.config.num_layers; ++layer) {
      CheckTask task{s, layer, 0, {}};
      for (size_t i = 0; i < steps.size(); ++i) {
        if (steps[i].layer == layer) task.steps.push_back({steps[i], &lanes[s].answers[i]});
      }
      if (task.steps.empty()) continue;
      for (task.kv_head = 0; task.kv_head < options_.config.num_kv_heads; ++task.kv_head) tasks.push_back(task);
    }
  }
  std::atomic<size_t> next{0};
  std::vector<CheckResult> results(std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::thread> threads;
  for (CheckResult& result : results) {
    threads.emplace_back([&] {
      for (size_t t = next++; t < tasks.size(); t = next++) {
        Merge(RunCheck(options_, tasks[t]), &result);
        int64_t work = 0;
        for (const auto& [step, answer] : tasks[t].steps) work += Work(step.tokens, 1);
        bar->Advance(kCheckShare * work / options_.config.num_kv_heads);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const CheckResult& result : results) Merge(result, &check_);
}

absl::Status Demo::CheckLengths() {
  const int64_t expected = options_.prefill + options_.decode;
  for (const client::Session& session : sessions_) {
    absl::StatusOr<client::SessionInfo> info = session.Get();
    if (!info.ok()) return info.status();
    for (int64_t length : info->layer_lengths) {
      if (length == expected) continue;
      return absl::DataLossError(
          absl::StrCat("a layer of session ", session.id(), " has ", length, " tokens and was sent ", expected));
    }
  }
  return absl::OkStatus();
}

int64_t Demo::expected_rows() const {
  return options_.sessions * options_.config.num_layers * options_.config.num_q_heads *
         (options_.prefill + options_.decode);
}

int64_t Demo::total_work() const {
  const int64_t chunks = (options_.prefill + options_.prefill_chunk - 1) / options_.prefill_chunk;
  const int64_t work = Work(options_.prefill + options_.decode, chunks + options_.decode);
  return (1 + kCheckShare) * work * options_.sessions * options_.config.num_layers;
}

double Demo::error_bound() const { return tool::ErrorBound(options_.config.kv_dtype); }

}  // namespace attnd::attnctl

// attnd_bench rpc: a one-token step against a real attnd on loopback, beside a bare gRPC echo of the same bytes in the
// same run, interleaved: as bare calls of the same bytes, and through the C++ client library.
#include "tests/bench/rpc.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "attnd/v1/attnd.pb.h"
#include "client/cpp/client.h"
#include "tests/bench/cases.h"
#include "tests/bench/measure.h"
#include "tests/bench/modes.h"
#include "tests/bench/report.h"
#include "tests/bench/served.h"

namespace attnd::bench {
namespace {

// Appends to the middle of a block: most steps neither begin a block nor fill one.
constexpr int64_t kFreeSlots = 32;

// One layer of one session of about `tokens` tokens, to which one-token steps are appended.
class OneTokenStep {
 public:
  OneTokenStep(const Case& options, const std::string& address)
      : options_(options),
        tokens_(std::max<int64_t>(0, options.tokens - kFreeSlots)),
        client_(Connect(address)),
        session_(CreateSession(options, client_)),
        q_(TensorOf(options, 1, options.shape.num_q_heads)),
        k_(TensorOf(options, 1, options.shape.num_kv_heads)) {
    Fill(options_, session_, tokens_);
    raw_ = std::make_unique<RawCalls>(address, Request().SerializeAsString());
    stream_ = client_.OpenStepStream();
  }

  void Unary() { raw_->Unary(); }
  void Stream() { raw_->Stream(); }
  void ClientUnary() { CheckOk(session_.Step(0, q_, k_, k_).status()); }
  void ClientStream() {
    absl::StatusOr<uint64_t> id = stream_->Send(*session_.MakeStep(0, q_, k_, k_));
    CheckOk(id.status());
    CheckOk(stream_->Wait(*id).status());
  }

  // Looks at the last bare call's answer, and cuts the session to its first length.
  void Reset(bool was_bare_call) {
    CheckOk(session_.Rewind(tokens_).status());
    if (!was_bare_call) return;
    v1::StepResponse answer;
    CheckOk(answer.ParseFromString(raw_->LastAnswer()) ? absl::OkStatus() : absl::InternalError("not a StepResponse"));
    CheckOk(answer.status().code() == 0 ? absl::OkStatus() : absl::InternalError(answer.status().message()));
    queue_us_.push_back(1e-3 * static_cast<double>(answer.timing().queue_ns()));
    compute_us_.push_back(1e-3 * static_cast<double>(answer.timing().compute_ns()));
  }

  size_t request_bytes() const { return Request().ByteSizeLong(); }

  // Medians of what the server says about its own part, in microseconds.
  double queue_us() { return Median(&queue_us_); }
  double compute_us() { return Median(&compute_us_); }

 private:
  static Client Connect(const std::string& address) {
    absl::StatusOr<Client> client = Client::Connect({.target = address});
    CheckOk(client.status());
    return *client;
  }

  v1::StepRequest Request() const {
    v1::StepRequest request;
    v1::Segment* segment = request.add_segments();
    segment->set_session_id(session_.id());
    segment->set_num_tokens(1);
    const auto fill = [](const std::vector<float>& values, v1::Tensor* tensor) {
      tensor->set_dtype(v1::DTYPE_F32);
      tensor->set_data(values.data(), values.size() * sizeof(float));
    };
    fill(q_, request.mutable_q());
    fill(k_, request.mutable_k());
    fill(k_, request.mutable_v());
    return request;
  }

  static double Median(std::vector<double>* values) {
    const auto middle = values->begin() + static_cast<std::ptrdiff_t>(values->size() / 2);
    std::nth_element(values->begin(), middle, values->end());
    return *middle;
  }

  const Case options_;
  const int64_t tokens_;
  const Client client_;
  const client::Session session_;
  const std::vector<float> q_, k_;
  std::unique_ptr<RawCalls> raw_;
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
  constexpr int64_t kAnswerRest = 32;  // what the answer holds beside its tensor: positions, timings, field headers
  const std::unique_ptr<ServingProcess> echo_server =
      ServingProcess::ForkEcho(static_cast<size_t>(q_bytes + kAnswerRest));
  const std::unique_ptr<ServingProcess> server = SpawnAttnd(c, int64_t{1} << 30);
  if (echo_server == nullptr || server == nullptr) return false;
  OneTokenStep step(c, server->address());
  RawCalls echo(echo_server->address(), std::string(step.request_bytes(), '\x2A'));
  const std::vector<std::function<void()>> works = {
      [&] { step.Unary(); },  [&] { echo.Unary(); },       [&] { step.Stream(); },
      [&] { echo.Stream(); }, [&] { step.ClientUnary(); }, [&] { step.ClientStream(); },
  };
  const std::vector<double> medians = MediansInterleaved(c.seconds, works, [&](size_t work) {
    if (work != 1 && work != 3) step.Reset(/*was_bare_call=*/work < 4);
  });
  const double compute = 1e-6 * step.compute_us();
  PrintRow(c, "rpc_unary", medians[0], medians[1]);
  PrintRow(c, "overhead_unary", medians[0] - compute, medians[1]);
  PrintRow(c, "client_unary", medians[4], medians[1]);
  PrintRow(c, "echo_unary", medians[1], medians[1]);
  PrintRow(c, "rpc_stream", medians[2], medians[3]);
  PrintRow(c, "overhead_stream", medians[2] - compute, medians[3]);
  PrintRow(c, "client_stream", medians[5], medians[3]);
  PrintRow(c, "echo_stream", medians[3], medians[3]);
  if (!c.json) {
    std::printf("of a step, in the server: %.1f us waiting, %.1f us computing (medians); overhead = rpc - computing\n",
                step.queue_us(), step.compute_us());
  }
  return true;
}

}  // namespace

int RunRpc(const Options& options) { return RunServed("rpc", options, RunCase); }

}  // namespace attnd::bench

#include "tests/service/harness.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "server/metrics.h"

namespace attnd::testing {

v1::Tensor F32(const Floats& values) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_F32);
  tensor.set_data(values.data(), values.size() * sizeof(float));
  return tensor;
}

Floats ToFloats(const v1::Tensor& tensor) {
  EXPECT_EQ(tensor.dtype(), v1::DTYPE_F32);
  Floats values(tensor.data().size() / sizeof(float));
  std::memcpy(values.data(), tensor.data().data(), values.size() * sizeof(float));
  return values;
}

namespace {

template <typename Detail>
bool FindDetail(const grpc::Status& status, absl::string_view type, Detail* detail) {
  v1::ErrorStatus wire;
  if (!wire.ParseFromString(status.error_details())) return false;
  for (const auto& any : wire.details()) {
    if (any.type_url() == absl::StrCat("type.googleapis.com/google.rpc.", type)) {
      EXPECT_EQ(wire.code(), static_cast<int>(status.error_code()));
      EXPECT_EQ(wire.message(), status.error_message());
      return detail->ParseFromString(any.value());
    }
  }
  return false;
}

}  // namespace

v1::ErrorInfo ErrorInfoOf(const grpc::Status& status) {
  v1::ErrorInfo info;
  EXPECT_TRUE(FindDetail(status, "ErrorInfo", &info)) << status.error_code() << " " << status.error_message();
  return info;
}

std::string ReasonOf(const grpc::Status& status) {
  v1::ErrorInfo info;
  return FindDetail(status, "ErrorInfo", &info) ? info.reason() : "";
}

bool HasRetryInfo(const grpc::Status& status) {
  v1::RetryInfo info;
  return FindDetail(status, "RetryInfo", &info) && (info.retry_delay().seconds() > 0 || info.retry_delay().nanos() > 0);
}

v1::StepRequest MeanStep(const std::string& session_id, const Floats& values) {
  v1::StepRequest request;
  v1::Segment* segment = request.add_segments();
  segment->set_session_id(session_id);
  segment->set_num_tokens(static_cast<int64_t>(values.size()));
  const Floats zeros(values.size(), 0.0f);
  *request.mutable_q() = F32(zeros);
  *request.mutable_k() = F32(zeros);
  *request.mutable_v() = F32(values);
  return request;
}

bool Eventually(const std::function<bool()>& condition, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!condition()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

void ComputeGate::Close() {
  absl::MutexLock lock(&mutex_);
  open_ = false;
  entered_at_close_ = entered_;
}

void ComputeGate::Open() {
  absl::MutexLock lock(&mutex_);
  open_ = true;
  ++openings_;
}

void ComputeGate::PassOne() {
  absl::MutexLock lock(&mutex_);
  entered_at_close_ = entered_;
  ++openings_;
}

std::function<absl::Status()> ComputeGate::hook() {
  return [this] {
    absl::MutexLock lock(&mutex_);
    if (open_) return absl::OkStatus();
    ++entered_;
    const auto released = [this, seen = openings_]()
                              ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return openings_ != seen; };
    mutex_.Await(absl::Condition(&released));
    return absl::OkStatus();
  };
}

void ComputeGate::AwaitBatch() {
  absl::MutexLock lock(&mutex_);
  const auto inside = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return entered_ > entered_at_close_; };
  EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&inside), absl::Seconds(10)));
}

ServiceTest::ServiceTest() = default;

ServiceTest::~ServiceTest() {
  gate_.Open();
  stub_.reset();
  server_.reset();
}

Options ServiceTest::DefaultOptions() {
  Options options;
  // Sanitized builds are slow: nothing is to depend on that.
  options.max_queue_delay = options.prefill_chunk_time = absl::InfiniteDuration();
  options.listen = "127.0.0.1:0";
  options.metrics_listen = "";
  options.kv_cache_bytes = int64_t{64} << 20;
  options.max_inflight_bytes = int64_t{1} << 30;
  options.compute_threads = 2;
  options.drain_timeout = absl::Seconds(5);
  return options;
}

void ServiceTest::StartServer(const Options& options) {
  Options gated = options;
  if (gated.compute_hook == nullptr) gated.compute_hook = gate_.hook();
  auto server = Server::Start(gated);
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  stub_ = v1::Attention::NewStub(NewChannel());
}

std::shared_ptr<grpc::Channel> ServiceTest::NewChannel() const {
  static std::atomic<int> number{0};
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt("attnd.test_channel", ++number);  // a connection of its own
  return grpc::CreateCustomChannel(server_->address(), grpc::InsecureChannelCredentials(), arguments);
}

v1::SessionConfig ServiceTest::MeanConfig(int num_layers) {
  v1::SessionConfig config;
  config.set_num_layers(num_layers);
  config.set_num_q_heads(1);
  config.set_num_kv_heads(1);
  config.set_head_dim(1);
  return config;
}

std::string ServiceTest::Create(int num_layers) { return Create(MeanConfig(num_layers)); }

std::string ServiceTest::Create(const v1::SessionConfig& config) { return testing::Create(stub_.get(), config); }

std::string Create(v1::Attention::Stub* stub, const v1::SessionConfig& config) {
  grpc::ClientContext context;
  v1::CreateSessionRequest request;
  *request.mutable_config() = config;
  v1::Session session;
  const grpc::Status status = stub->CreateSession(&context, request, &session);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return session.session_id();
}

grpc::Status ServiceTest::Step(const v1::StepRequest& request, v1::StepResponse* response) {
  return testing::Step(stub_.get(), request, response);
}

grpc::Status Step(v1::Attention::Stub* stub, const v1::StepRequest& request, v1::StepResponse* response) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  return stub->Step(&context, request, response);
}

Floats ServiceTest::Mean(const std::string& session_id, const Floats& values) {
  v1::StepResponse response;
  const grpc::Status status = Step(MeanStep(session_id, values), &response);
  EXPECT_TRUE(status.ok()) << status.error_code() << " " << status.error_message();
  return ToFloats(response.out());
}

grpc::Status ServiceTest::MeanError(const std::string& session_id, const Floats& values) {
  v1::StepResponse response;
  return Step(MeanStep(session_id, values), &response);
}

v1::Session ServiceTest::Get(const std::string& session_id) {
  grpc::ClientContext context;
  v1::GetSessionRequest request;
  request.set_session_id(session_id);
  v1::Session session;
  const grpc::Status status = stub_->GetSession(&context, request, &session);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return session;
}

grpc::Status ServiceTest::Close(const std::string& session_id) {
  grpc::ClientContext context;
  v1::CloseSessionRequest request;
  request.set_session_id(session_id);
  v1::CloseSessionResponse response;
  return stub_->CloseSession(&context, request, &response);
}

grpc::Status ServiceTest::Attend(const v1::AttendRequest& request, v1::AttendResponse* response) {
  grpc::ClientContext context;
  return stub_->Attend(&context, request, response);
}

v1::ServerInfo ServiceTest::Info() {
  grpc::ClientContext context;
  v1::ServerInfo info;
  EXPECT_TRUE(stub_->GetServerInfo(&context, v1::GetServerInfoRequest(), &info).ok());
  return info;
}

std::map<std::string, double> ServiceTest::AllMetrics() {
  std::map<std::string, double> values;
  for (const absl::string_view line : absl::StrSplit(server_->metrics().Text(), '\n', absl::SkipEmpty())) {
    if (line.front() == '#') continue;
    const size_t space = line.rfind(' ');
    double value = 0;
    EXPECT_TRUE(absl::SimpleAtod(line.substr(space + 1), &value)) << line;
    values[std::string(line.substr(0, space))] = value;
  }
  return values;
}

double ServiceTest::Metric(const std::string& series) {
  const std::map<std::string, double> values = AllMetrics();
  const auto found = values.find(series);
  if (found != values.end()) return found->second;
  ADD_FAILURE() << "no series " << series;
  return std::numeric_limits<double>::quiet_NaN();
}

double ServiceTest::Handled(absl::string_view method, absl::string_view code) {
  return Metric(absl::StrCat("attnd_rpc_handled_total{code=\"", code, "\",method=\"", method, "\"}"));
}

bool ServiceTest::WaitForMetric(const std::string& series, double value, absl::Duration timeout) {
  return Eventually([&] { return Metric(series) == value; }, timeout);
}

}  // namespace attnd::testing

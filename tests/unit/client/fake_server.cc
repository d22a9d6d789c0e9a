#include "tests/unit/client/fake_server.h"

#include <grpcpp/grpcpp.h>

#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "attnd/v1/attnd.grpc.pb.h"
#include "attnd/v1/error_details.pb.h"
#include "client/tool/float64_head.h"

namespace attnd {
namespace {

constexpr int kMaxMessage = 64 << 20;

grpc::Status ToGrpc(const FakeError& error) {
  v1::ErrorStatus details;
  details.set_code(static_cast<int>(error.code));
  details.set_message(error.message);
  v1::ErrorInfo info;
  info.set_reason(error.reason);
  info.set_domain("attnd");
  (*info.mutable_metadata())["fake"] = "yes";
  auto* any = details.add_details();
  any->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  any->set_value(info.SerializeAsString());
  if (error.retry_delay) {
    v1::RetryInfo retry;
    retry.mutable_retry_delay()->set_nanos(static_cast<int>(absl::ToInt64Nanoseconds(*error.retry_delay)));
    any = details.add_details();
    any->set_type_url("type.googleapis.com/google.rpc.RetryInfo");
    any->set_value(retry.SerializeAsString());
  }
  return {static_cast<grpc::StatusCode>(error.code), error.message, details.SerializeAsString()};
}

std::vector<float> Floats(const v1::Tensor& tensor) {
  std::vector<float> floats(tensor.data().size() / sizeof(float));
  if (!floats.empty()) std::memcpy(floats.data(), tensor.data().data(), floats.size() * sizeof(float));
  return floats;
}

// K and V of one layer, by kv head: [tokens, dim].
struct FakeLayer {
  std::vector<std::vector<float>> k, v;
  int64_t length = 0;
};

struct FakeSession {
  v1::SessionConfig config;
  std::vector<FakeLayer> layers;
};

}  // namespace

// ---- the service

class FakeServer::Service final : public v1::Attention::Service {
 public:
  explicit Service(FakeFaults* faults) : faults_(*faults) {}
  int calls() const { return calls_; }
  int step_calls() const { return step_calls_; }

  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest*,
                             v1::ServerInfo* info) override {
    grpc::Status refused = Arrive(context);
    if (!refused.ok()) return refused;
    std::lock_guard<std::mutex> lock(mutex_);
    info->set_version("fake");
    info->set_max_message_bytes(kMaxMessage);
    info->set_sessions_active(static_cast<int64_t>(sessions_.size()));
    return grpc::Status::OK;
  }

  grpc::Status CreateSession(grpc::ServerContext* context, const v1::CreateSessionRequest* request,
                             v1::Session* session) override {
    grpc::Status refused = Arrive(context);
    if (!refused.ok()) return refused;
    std::lock_guard<std::mutex> lock(mutex_);
    const std::string id = absl::StrCat("session-", ++created_);
    FakeSession& fake = sessions_[id];
    fake.config = request->config();
    if (fake.config.value_dim() == 0) fake.config.set_value_dim(fake.config.head_dim());
    fake.layers.resize(fake.config.num_layers());
    for (FakeLayer& layer : fake.layers) {
      layer.k.resize(fake.config.num_kv_heads());
      layer.v.resize(fake.config.num_kv_heads());
    }
    Describe(id, fake, session);
    return grpc::Status::OK;
  }

  grpc::Status GetSession(grpc::ServerContext* context, const v1::GetSessionRequest* request,
                          v1::Session* session) override {
    grpc::Status refused = Arrive(context);
    if (!refused.ok()) return refused;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = sessions_.find(request->session_id());
    if (found == sessions_.end()) return Lost(request->session_id());
    Describe(found->first, found->second, session);
    return grpc::Status::OK;
  }

  grpc::Status ForkSession(grpc::ServerContext* context, const v1::ForkSessionRequest* request,
                           v1::Session* session) override {
    grpc::Status refused = Arrive(context);
    if (!refused.ok()) return refused;
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = sessions_.find(request->session_id());
    if (found == sessions_.end()) return Lost(request->session_id());
    const FakeSession copy = found->second;
    const std::string id = absl::StrCat("session-", ++created_);
    Describe(id, sessions_[id] = copy, session);
    return grpc::Status::OK;
  }

  grpc::Status ReorderSessions(grpc::ServerContext* context, const v1::ReorderSessionsRequest* request,
                               v1::ReorderSessionsResponse* response) override {
    grpc::Status refused = Arrive(context);
    if (!refused.ok()) return refused;
    std::lock_guard<std::mutex> lock(mutex_);
    const std::map<std::string, FakeSession> before(sessions_.begin(), sessions_.end());
    for (int i = 0; i < request->session_ids_size(); i++) {
      const FakeSession& source = before.at(request->session_ids(request->sources(i)));
      sessions_[request->session_ids(i)] = source;
      response->add_lengths(source.layers[0].length);
    }
    return grpc::Status::OK;
  }

  grpc::Status CloseSession(grpc::ServerContext* context, const v1::CloseSessionRequest* request,
                            v1::CloseSessionResponse* response) override {
    grpc::Status refused = Arrive(context);
    if (!refused.ok()) return refused;
    std::lock_guard<std::mutex> lock(mutex_);
    response->set_was_open(sessions_.erase(request->session_id()) == 1);
    return grpc::Status::OK;
  }

  grpc::Status Step(grpc::ServerContext* context, const v1::StepRequest* request, v1::StepResponse* response) override {
    ++step_calls_;
    grpc::Status refused = Arrive(context);
    if (!refused.ok()) return refused;
    return Handle(*request, response);
  }

  grpc::Status StepStream(grpc::ServerContext* context,
                          grpc::ServerReaderWriter<v1::StepResponse, v1::StepRequest>* stream) override {
    grpc::Status refused = Arrive(context);
    if (!refused.ok()) return refused;
    v1::StepRequest request;
    while (stream->Read(&request)) {
      v1::StepResponse response;
      const grpc::Status status = Handle(request, &response);
      response.set_request_id(request.request_id());
      if (!status.ok()) {
        response.mutable_status()->set_code(status.error_code());
        response.mutable_status()->set_message(status.error_message());
        response.mutable_status()->set_reason("NEVER_EXISTED");
      }
      if (!stream->Write(response)) break;
    }
    return grpc::Status::OK;
  }

 private:
  grpc::Status Arrive(grpc::ServerContext* context) {
    ++calls_;
    if (!faults_.token.empty()) {
      const auto found = context->client_metadata().find("authorization");
      if (found == context->client_metadata().end() || found->second != "Bearer " + faults_.token) {
        return ToGrpc({absl::StatusCode::kUnauthenticated, "BAD_TOKEN", "a bearer token is needed", {}});
      }
    }
    if (faults_.fail_calls > 0 && faults_.fail_calls-- > 0) return ToGrpc(faults_.error);
    return grpc::Status::OK;
  }

  static grpc::Status Lost(const std::string& id) {
    return ToGrpc({absl::StatusCode::kNotFound, "NEVER_EXISTED", absl::StrCat("no session ", id), {}});
  }

  static void Describe(const std::string& id, const FakeSession& fake, v1::Session* session) {
    session->set_session_id(id);
    *session->mutable_config() = fake.config;
    for (const FakeLayer& layer : fake.layers) session->add_layer_lengths(layer.length);
  }

  grpc::Status Handle(const v1::StepRequest& request, v1::StepResponse* response) {
    if (faults_.delay_ms > 0) absl::SleepFor(absl::Milliseconds(faults_.delay_ms.load()));
    grpc::Status status = AppendAndAttend(request, response);
    if (!status.ok()) return status;
    if (faults_.corrupt_steps > 0 && --faults_.corrupt_steps == 0) {
      std::string* data = response->mutable_out()->mutable_data();
      data->at(data->size() / 2 + 3) ^= 0x40;  // an exponent bit of one element
    }
    if (faults_.lose_answers > 0 && faults_.lose_answers-- > 0) return ToGrpc(faults_.error);
    return status;
  }

  grpc::Status AppendAndAttend(const v1::StepRequest& request, v1::StepResponse* response) {
    std::lock_guard<std::mutex> lock(mutex_);
    const v1::Segment& segment = request.segments(0);
    auto found = sessions_.find(segment.session_id());
    if (found == sessions_.end()) return Lost(segment.session_id());
    const v1::SessionConfig& c = found->second.config;
    FakeLayer& layer = found->second.layers.at(request.layer());
    const int64_t start = segment.has_start_position() ? segment.start_position() : layer.length;
    const bool replay = start + segment.num_tokens() == layer.length;
    if (start != layer.length && !replay) {
      return ToGrpc({absl::StatusCode::kFailedPrecondition,
                     "BAD_POSITION",
                     absl::StrCat("start_position ", start, ", length ", layer.length),
                     {}});
    }
    Append(Floats(request.k()), c.num_kv_heads(), c.head_dim(), start, &layer.k);
    Append(Floats(request.v()), c.num_kv_heads(), c.value_dim(), start, &layer.v);
    layer.length = start + segment.num_tokens();
    Attend(c, layer, start, Floats(request.q()), response->mutable_out());
    v1::SegmentResult* result = response->add_segments();
    result->set_start_position(start);
    result->set_length(layer.length);
    return grpc::Status::OK;
  }

  // rows: [tokens, heads, dim]
  static void Append(const std::vector<float>& rows, int heads, int dim, int64_t start,
                     std::vector<std::vector<float>>* cache) {
    const size_t tokens = rows.size() / (heads * dim);
    for (int h = 0; h < heads; ++h) {
      cache->at(h).resize(start * dim);
      for (size_t t = 0; t < tokens; ++t) {
        const auto row = rows.begin() + static_cast<std::ptrdiff_t>((t * heads + h) * dim);
        cache->at(h).insert(cache->at(h).end(), row, row + dim);
      }
    }
  }

  static void Attend(const v1::SessionConfig& c, const FakeLayer& layer, int64_t start, const std::vector<float>& q,
                     v1::Tensor* out) {
    const int64_t tokens = static_cast<int64_t>(q.size()) / (c.num_q_heads() * c.head_dim());
    const int group = c.num_q_heads() / c.num_kv_heads();
    std::vector<float> answer(tokens * c.num_q_heads() * c.value_dim());
    std::vector<double> wide(q.begin(), q.end()), row(c.value_dim());
    for (int h = 0; h < c.num_q_heads(); ++h) {
      tool::Float64Head head(c.head_dim(), c.value_dim(), layer.length, layer.k[h / group], layer.v[h / group]);
      for (int64_t t = 0; t < tokens; ++t) {
        const int64_t r = t * c.num_q_heads() + h;
        head.Attend({&wide[r * c.head_dim()], static_cast<size_t>(c.head_dim())}, 1, start + t + 1,
                    1.0 / std::sqrt(c.head_dim()), row);
        std::copy(row.begin(), row.end(), answer.begin() + r * c.value_dim());
      }
    }
    out->set_dtype(v1::DTYPE_F32);
    out->set_data(answer.data(), answer.size() * sizeof(float));
  }

  FakeFaults& faults_;
  std::atomic<int> calls_{0}, step_calls_{0};
  std::mutex mutex_;
  int created_ = 0;
  std::map<std::string, FakeSession> sessions_;
};

// ---- the server

struct FakeServer::Running {
  explicit Running(FakeFaults* faults) : service(faults) {}
  Service service;
  std::unique_ptr<grpc::Server> server;
};

FakeServer::FakeServer() : faults_(std::make_unique<FakeFaults>()) { Start(0); }
FakeServer::~FakeServer() { Stop(); }

void FakeServer::Start(int port) {
  running_ = std::make_unique<Running>(faults_.get());
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(kMaxMessage);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddListeningPort(absl::StrCat("127.0.0.1:", port), grpc::InsecureServerCredentials(), &port_);
  builder.RegisterService(&running_->service);
  running_->server = builder.BuildAndStart();
}

void FakeServer::Stop() {
  if (running_ == nullptr) return;
  running_->server->Shutdown(std::chrono::system_clock::now());
  running_->server->Wait();
  calls_ = calls();
  step_calls_ = step_calls();
  running_.reset();
}

void FakeServer::Restart() {
  Stop();
  Start(port_);
}

std::string FakeServer::target() const { return absl::StrCat("127.0.0.1:", port_); }
int FakeServer::port() const { return port_; }
FakeFaults& FakeServer::faults() { return *faults_; }
int FakeServer::calls() const { return calls_ + (running_ ? running_->service.calls() : 0); }
int FakeServer::step_calls() const { return step_calls_ + (running_ ? running_->service.step_calls() : 0); }

}  // namespace attnd

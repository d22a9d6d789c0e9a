#include "server/rpc/attention_service.h"

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <algorithm>
#include <vector>

#include "attnd/v1/attnd.grpc.pb.h"
#include "server/rpc/attention_calls.h"
#include "server/rpc/export_call.h"
#include "server/rpc/import_call.h"
#include "server/rpc/service_state.h"
#include "server/rpc/session_calls.h"
#include "server/rpc/step_stream.h"

namespace attnd {
namespace {

// What the fields around an answer's tensors may take of a message.
constexpr int64_t kAnswerOverheadBytes = 64 << 10;

using A = v1::Attention;
using RawService = A::WithRawCallbackMethod_Attend<
    A::WithRawCallbackMethod_AttendBackward<A::WithRawCallbackMethod_CreateSession<A::WithRawCallbackMethod_Step<
        A::WithRawCallbackMethod_StepStream<A::WithRawCallbackMethod_RewindSession<A::WithRawCallbackMethod_GetSession<
            A::WithRawCallbackMethod_ListSessions<A::WithRawCallbackMethod_CloseSession<
                A::WithRawCallbackMethod_GetServerInfo<A::WithRawCallbackMethod_ForkSession<
                    A::WithRawCallbackMethod_ReorderSessions<A::WithRawCallbackMethod_ExportSession<
                        A::WithRawCallbackMethod_ImportSession<A::Service>>>>>>>>>>>>>>;

class Service final : public RawService {
 public:
  explicit Service(ServiceState* state) : state_(state) {}

  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;

  grpc::ServerUnaryReactor* Attend(Context* context, const Bytes* in, Bytes* out) override {
    return StartCall<AttendCall>(state_, context, in, out);
  }
  grpc::ServerUnaryReactor* AttendBackward(Context* context, const Bytes* in, Bytes* out) override {
    return StartCall<AttendBackwardCall>(state_, context, in, out);
  }
  grpc::ServerUnaryReactor* CreateSession(Context* context, const Bytes* in, Bytes* out) override {
    return StartCall<CreateSessionCall>(state_, context, in, out);
  }
  grpc::ServerUnaryReactor* Step(Context* context, const Bytes* in, Bytes* out) override {
    return StartCall<StepCall>(state_, context, in, out);
  }
  grpc::ServerBidiReactor<Bytes, Bytes>* StepStream(Context* context) override {
    return StepStreamCall::Start(state_, context);
  }
  grpc::ServerUnaryReactor* RewindSession(Context* context, const Bytes* in, Bytes* out) override {
    return StartCall<RewindSessionCall>(state_, context, in, out);
  }
  grpc::ServerUnaryReactor* ForkSession(Context* context, const Bytes* in, Bytes* out) override {
    return StartCall<ForkSessionCall>(state_, context, in, out);
  }
  grpc::ServerUnaryReactor* ReorderSessions(Context* context, const Bytes* in, Bytes* out) override {
    return StartCall<ReorderSessionsCall>(state_, context, in, out);
  }
  grpc::ServerWriteReactor<Bytes>* ExportSession(Context* context, const Bytes* in) override {
    return ExportCall::Start(state_, context, in);
  }
  grpc::ServerReadReactor<Bytes>* ImportSession(Context* context, Bytes* out) override {
    return ImportCall::Start(state_, context, out);
  }
  grpc::ServerUnaryReactor* GetSession(Context* context, const Bytes* in, Bytes* out) override {
    return StartCall<GetSessionCall>(state_, context, in, out);
  }
  grpc::ServerUnaryReactor* ListSessions(Context* context, const Bytes* in, Bytes* out) override {
    return StartCall<ListSessionsCall>(state_, context, in, out);
  }
  grpc::ServerUnaryReactor* CloseSession(Context* context, const Bytes* in, Bytes* out) override {
    return StartCall<CloseSessionCall>(state_, context, in, out);
  }
  grpc::ServerUnaryReactor* GetServerInfo(Context* context, const Bytes* in, Bytes* out) override {
    return StartCall<GetServerInfoCall>(state_, context, in, out);
  }

 private:
  ServiceState* const state_;
};

}  // namespace

ServiceState::ServiceState(Engine* engine_arg, RpcObserver* observer_arg, const RpcOptions& options_arg)
    : engine(engine_arg),
      observer(observer_arg),
      options(options_arg),
      max_answer_bytes(options_arg.max_message_bytes -
                       std::min(kAnswerOverheadBytes, options_arg.max_message_bytes / 2)),
      admission(options_arg.max_inflight_bytes, options_arg.max_streams) {}

std::vector<std::shared_ptr<StreamCall>> ServiceState::Streams() {
  absl::MutexLock lock(&streams_mutex);
  return {streams.begin(), streams.end()};
}

AttentionService::AttentionService(Engine* engine, RpcObserver* observer, const RpcOptions& options)
    : state_(std::make_unique<ServiceState>(engine, observer, options)),
      service_(std::make_unique<Service>(state_.get())) {}

AttentionService::~AttentionService() = default;

grpc::Service* AttentionService::service() { return service_.get(); }

EdgeStats AttentionService::stats() const {
  const Admission& admission = state_->admission;
  return {admission.bytes(), admission.max_bytes(), admission.max_streams()};
}

void AttentionService::BeginDrain() {
  state_->admission.BeginDrain();
  for (const auto& stream : state_->Streams()) stream->BeginDrain();
}

void AttentionService::CutOff() {
  for (const auto& stream : state_->Streams()) stream->CutOff();
}

bool AttentionService::WaitForCalls(absl::Time deadline) { return state_->admission.WaitForCalls(deadline); }

}  // namespace attnd

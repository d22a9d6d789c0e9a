#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/client_unary_call.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "attnd/v1/attnd.grpc.pb.h"
#include "tests/bench/rpc.h"

namespace attnd::bench {
namespace {

constexpr char kStep[] = "/attnd.v1.Attention/Step";
constexpr char kStepStream[] = "/attnd.v1.Attention/StepStream";

grpc::ByteBuffer Wrap(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

void Check(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "attnd_bench: a bare call failed: %s\n", what);
  std::exit(1);
}

// ---- the server

class EchoStream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit EchoStream(const grpc::ByteBuffer& answer) : answer_(answer) { StartRead(&request_); }
  void OnReadDone(bool ok) override { ok ? StartWrite(&answer_) : Finish(grpc::Status::OK); }
  void OnWriteDone(bool ok) override {
    if (ok) StartRead(&request_);
  }
  void OnDone() override { delete this; }

 private:
  grpc::ByteBuffer request_;
  const grpc::ByteBuffer answer_;
};

using RawStep = v1::Attention::WithRawCallbackMethod_Step<v1::Attention::Service>;
using RawService = v1::Attention::WithRawCallbackMethod_StepStream<RawStep>;

class EchoService final : public RawService {
 public:
  explicit EchoService(size_t answer_bytes) : answer_(Wrap(std::string(answer_bytes, '\x2A'))) {}

  grpc::ServerUnaryReactor* Step(grpc::CallbackServerContext* context, const grpc::ByteBuffer*,
                                 grpc::ByteBuffer* response) override {
    *response = answer_;
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(grpc::Status::OK);
    return reactor;
  }

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* StepStream(grpc::CallbackServerContext*) override {
    return new EchoStream(answer_);
  }

 private:
  const grpc::ByteBuffer answer_;
};

}  // namespace

void ServeEcho(size_t answer_bytes, int output) {
  EchoService service(answer_bytes);
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  dprintf(output, "echo serving on 127.0.0.1:%d\n", port);
  for (;;) pause();
}

// ---- the bare calls

struct RawCalls::Impl {
  using Stream = grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>;

  Impl(const std::string& address, const std::string& request_bytes)
      : channel(grpc::CreateChannel(address, grpc::InsecureChannelCredentials())),
        request(Wrap(request_bytes)),
        unary(kStep, grpc::internal::RpcMethod::NORMAL_RPC, channel),
        streamed(kStepStream, grpc::internal::RpcMethod::BIDI_STREAMING, channel) {}

  std::shared_ptr<grpc::Channel> channel;
  const grpc::ByteBuffer request;
  const grpc::internal::RpcMethod unary, streamed;
  grpc::ClientContext stream_context;
  std::unique_ptr<Stream> stream;
  grpc::ByteBuffer answer;
};

RawCalls::RawCalls(const std::string& address, const std::string& request)
    : impl_(std::make_unique<Impl>(address, request)) {
  impl_->stream.reset(grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(
      impl_->channel.get(), impl_->streamed, &impl_->stream_context));
}

RawCalls::~RawCalls() {
  impl_->stream->WritesDone();
  Check(impl_->stream->Finish().ok(), "end of the stream");
}

void RawCalls::Unary() {
  grpc::ClientContext context;
  impl_->answer.Clear();
  const grpc::Status status = grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(
      impl_->channel.get(), impl_->unary, &context, impl_->request, &impl_->answer);
  Check(status.ok(), status.error_message().c_str());
}

void RawCalls::Stream() {
  impl_->answer.Clear();
  Check(impl_->stream->Write(impl_->request) && impl_->stream->Read(&impl_->answer), "the stream broke");
}

std::string RawCalls::LastAnswer() const {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  Check(impl_->answer.Dump(&slices).ok(), "no answer");
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

}  // namespace attnd::bench

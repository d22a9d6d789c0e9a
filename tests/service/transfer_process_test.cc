// Snapshots between processes: other threads, another instruction set, and memory that does not grow with the session.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "tests/service/harness.h"
#include "tests/service/program.h"
#include "tests/service/transfer_calls.h"

namespace attnd::testing {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kMemoryIsMeasurable = false;
#else
constexpr bool kMemoryIsMeasurable = true;
#endif

constexpr int64_t kMiB = 1 << 20;

struct Peer {
  explicit Peer(const std::vector<std::string>& arguments, const std::vector<std::string>& environment = {}) {
    std::vector<std::string> all = {"--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0"};
    all.insert(all.end(), arguments.begin(), arguments.end());
    program = std::make_unique<Program>(all, environment);
    EXPECT_TRUE(program->AwaitStart()) << program->err();
    stub = v1::Attention::NewStub(program->NewChannel());
  }
  std::unique_ptr<Program> program;
  std::unique_ptr<v1::Attention::Stub> stub;
};

v1::SessionConfig Config(v1::KvDType dtype) {
  v1::SessionConfig config;
  config.set_num_layers(1);
  config.set_num_q_heads(4);
  config.set_num_kv_heads(2);
  config.set_head_dim(64);
  config.set_kv_dtype(dtype);
  return config;
}

v1::StepRequest WaveStep(const std::string& id, int tokens, int seed) {
  const auto wave = [seed](int count, double frequency) {
    Floats values(count);
    for (int i = 0; i < count; ++i) values[i] = static_cast<float>(std::sin(frequency * (i + 1) + seed));
    return values;
  };
  v1::StepRequest request;
  v1::Segment* segment = request.add_segments();
  segment->set_session_id(id);
  segment->set_num_tokens(tokens);
  *request.mutable_q() = F32(wave(tokens * 4 * 64, 0.37));
  *request.mutable_k() = F32(wave(tokens * 2 * 64, 0.53));
  *request.mutable_v() = F32(wave(tokens * 2 * 64, 0.71));
  return request;
}

Floats Out(v1::Attention::Stub* stub, const v1::StepRequest& request) {
  v1::StepResponse response;
  const grpc::Status status = Step(stub, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return ToFloats(response.out());
}

double RelativeError(const Floats& a, const Floats& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / norm);
}

TEST(TransferBetweenProcesses, OtherThreadsGiveTheSameBitsAndAnotherInstructionSetTheSameNumbers) {
  Peer one({"--compute_threads=1", "--kv_cache_bytes=64MiB"}), four({"--compute_threads=4", "--kv_cache_bytes=64MiB"});
  Peer avx2({"--compute_threads=2", "--kv_cache_bytes=64MiB"}, {"ONEDNN_MAX_CPU_ISA=AVX2"});
  const std::pair<v1::KvDType, double> bounds[] = {
      {v1::KV_DTYPE_F32, 1e-5}, {v1::KV_DTYPE_BF16, 1e-2}, {v1::KV_DTYPE_F16, 1e-2}, {v1::KV_DTYPE_INT8, 3e-2}};
  for (const auto& [dtype, bound] : bounds) {
    const std::string id = Create(one.stub.get(), Config(dtype));
    Out(one.stub.get(), WaveStep(id, 777, 1));
    const std::string bytes = Export(one.stub.get(), id);
    const std::string on_four = Import(four.stub.get(), bytes), on_avx2 = Import(avx2.stub.get(), bytes);
    EXPECT_EQ(Export(avx2.stub.get(), on_avx2), bytes) << "blocks are the same on every machine";
    for (const int tokens : {1, 50, 1}) {
      const Floats stayed = Out(one.stub.get(), WaveStep(id, tokens, tokens));
      EXPECT_EQ(Out(four.stub.get(), WaveStep(on_four, tokens, tokens)), stayed) << v1::KvDType_Name(dtype);
      EXPECT_LE(RelativeError(Out(avx2.stub.get(), WaveStep(on_avx2, tokens, tokens)), stayed), 2 * bound)
          << v1::KvDType_Name(dtype);
    }
  }
}

// A session of 256 MiB goes out, to a client that reads all and to one that reads slowly, and comes in again: what the
// process holds grows by the cache's own blocks alone.
TEST(TransferBetweenProcesses, MemoryIsBoundedWhateverTheSessionsSize) {
  if (!kMemoryIsMeasurable) GTEST_SKIP() << "AddressSanitizer keeps freed memory";
  constexpr int kSessionMiB = 256;
  constexpr int64_t kAllowed = 40 * kMiB;
  Peer from({"--compute_threads=1", "--kv_cache_bytes=272MiB"}), to({"--compute_threads=1", "--kv_cache_bytes=272MiB"});
  const std::string id = CreateBig(from.stub.get(), kSessionMiB);
  const int64_t from_before = from.program->ResidentBytes(), to_before = to.program->ResidentBytes();
  int64_t from_most = 0, to_most = 0;
  const auto watch = [&] {
    from_most = std::max(from_most, from.program->ResidentBytes() - from_before);
    to_most = std::max(to_most, to.program->ResidentBytes() - to_before);
  };
  OpenExport slow(from.stub.get(), id);
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(slow.Read());
    absl::SleepFor(absl::Milliseconds(20));
    watch();
  }
  OpenExport exported(from.stub.get(), id);
  OpenImport imported(to.stub.get());
  while (exported.Read()) {
    ASSERT_TRUE(imported.Write(exported.response.data()));
    watch();
  }
  ASSERT_TRUE(exported.reader->Finish().ok());
  imported.writer->WritesDone();
  ASSERT_TRUE(imported.writer->Finish().ok());
  EXPECT_EQ(imported.session.length(), kSessionMiB * 128);
  watch();
  slow.context.TryCancel();
  EXPECT_FALSE(slow.reader->Finish().ok());
  printf("[ memory   ] the sender grew by %.1f MiB, the receiver by %.1f MiB (%d of them the session)\n",
         static_cast<double>(from_most) / kMiB, static_cast<double>(to_most) / kMiB, kSessionMiB);
  EXPECT_GT(exported.received, kSessionMiB * kMiB);
  EXPECT_LT(from_most, kAllowed);
  EXPECT_LT(to_most, kSessionMiB * kMiB + kAllowed);
}

}  // namespace
}  // namespace attnd::testing

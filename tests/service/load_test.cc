// Many sessions and steps: answers stay apart, and memory stays where it was.
#include <malloc.h>

#include <atomic>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/service/harness.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;

// AddressSanitizer keeps freed memory for a while.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kMemoryIsMeasurable = false;
#else
constexpr bool kMemoryIsMeasurable = true;
#endif

class LoadTest : public ServiceTest {
 protected:
  // Steps `sessions` round robin over one stream, `steps` in all, pipelined. Each session's values are its number.
  void PipelinedSteps(const std::vector<std::string>& sessions, int steps) {
    grpc::ClientContext context;
    auto stream = stub_->StepStream(&context);
    std::thread writer([&] {
      for (int i = 0; i < steps; ++i) {
        const size_t session = i % sessions.size();
        v1::StepRequest request = MeanStep(sessions[session], {static_cast<float>(session)});
        request.set_request_id(session);
        if (!stream->Write(request)) break;
      }
      stream->WritesDone();
    });
    v1::StepResponse response;
    int answers = 0;
    while (stream->Read(&response)) {
      ++answers;
      ASSERT_FALSE(response.has_status()) << response.status().message();
      ASSERT_NEAR(ToFloats(response.out())[0], response.request_id(), 1e-4 * (1 + response.request_id()));
    }
    writer.join();
    EXPECT_EQ(answers, steps);
    EXPECT_TRUE(stream->Finish().ok());
  }

  // Resident memory beside the cache; what the allocator holds but nobody uses is given back first.
  double ResidentBesideCache() {
    malloc_trim(0);
    return Metric("process_resident_memory_bytes") - Metric("attnd_kv_cache_used_bytes");
  }
};

TEST_F(LoadTest, MemoryIsFlatOverAThousandSessionsAndTenThousandSteps) {
  StartServer();
  std::vector<std::string> sessions;
  for (int i = 0; i < 1000; ++i) sessions.push_back(Create());
  EXPECT_EQ(Metric("attnd_sessions_active"), 1000);
  PipelinedSteps(sessions, 2000);  // every session has its block now, and every pool its size
  const double before = ResidentBesideCache();
  PipelinedSteps(sessions, 10'000);
  const double after = ResidentBesideCache();
  if (kMemoryIsMeasurable) {
    EXPECT_LT(after - before, 4 << 20) << "from " << before;
  }
  EXPECT_EQ(Metric("attnd_kv_cache_tokens"), 12'000);
  for (const std::string& id : sessions) EXPECT_TRUE(Close(id).ok());
  EXPECT_EQ(Metric("attnd_sessions_active"), 0);
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), 0);
  EXPECT_EQ(Metric("attnd_kv_cache_reserved_bytes"), 0);
  EXPECT_EQ(Metric("attnd_kv_cache_tokens"), 0);
}

TEST_F(LoadTest, G15_CyclesOfSessionsGiveEverythingBack) {
  StartServer();
  v1::SessionConfig config = MeanConfig(4);
  config.set_head_dim(128);
  double early = 0, late = 0;
  for (int cycle = 0; cycle < 20; ++cycle) {
    std::vector<std::string> sessions;
    for (int i = 0; i < 50; ++i) sessions.push_back(Create(config));
    for (const std::string& id : sessions) {
      v1::StepRequest request = MeanStep(id, Floats(64, 0));
      for (v1::Tensor* tensor : {request.mutable_q(), request.mutable_k(), request.mutable_v()}) {
        *tensor = F32(Floats(64 * 128, 1));
      }
      for (int layer = 0; layer < 4; ++layer) {
        request.set_layer(layer);
        v1::StepResponse response;
        ASSERT_TRUE(Step(request, &response).ok());
      }
    }
    EXPECT_GT(Metric("attnd_kv_cache_used_bytes"), 0);
    for (const std::string& id : sessions) EXPECT_TRUE(Close(id).ok());
    ASSERT_EQ(Metric("attnd_kv_cache_used_bytes"), 0);
    if (cycle == 4) early = Metric("process_resident_memory_bytes");
    late = Metric("process_resident_memory_bytes");
  }
  if (kMemoryIsMeasurable) {
    EXPECT_LT(late, early * 1.2);
  }
}

TEST_F(LoadTest, S19_SessionsDoNotMixUnderLoad) {
  StartServer();
  std::vector<std::thread> clients;
  for (int client = 0; client < 8; ++client) {
    clients.emplace_back([&, client] {
      const std::string id = Create();
      const auto value = static_cast<float>(client + 1);
      for (int i = 0; i < 100; ++i) {
        const Floats out = Mean(id, Floats(1 + i % 3, value));
        for (const float x : out) ASSERT_NEAR(x, value, 1e-4);
      }
      EXPECT_TRUE(Close(id).ok());
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), 0);
}

// G06: nobody computes, many clients send; what does not fit is refused and memory stays bounded.
TEST_F(LoadTest, G06_ASlowServerDoesNotHoardRequests) {
  Options options = DefaultOptions();
  options.max_message_bytes = 2 << 20;
  options.max_inflight_bytes = 32 << 20;
  StartServer(options);
  v1::SessionConfig config = MeanConfig();
  config.set_head_dim(256);
  std::vector<std::string> sessions;
  for (int i = 0; i < 60; ++i) sessions.push_back(Create(config));
  gate_.Close();
  const double before = Metric("process_resident_memory_bytes");
  std::atomic<int> refused{0}, answered{0};
  std::vector<std::thread> clients;
  for (const std::string& id : sessions) {
    clients.emplace_back([&, id] {
      v1::StepRequest request = MeanStep(id, Floats(340, 0));
      for (v1::Tensor* tensor : {request.mutable_q(), request.mutable_k(), request.mutable_v()}) {
        *tensor = F32(Floats(340 * 256, 1));
      }
      v1::StepResponse response;
      const grpc::Status status = Step(request, &response);
      if (status.ok()) {
        ++answered;
      } else {
        EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
        ++refused;
      }
    });
  }
  EXPECT_TRUE(Eventually([&] { return refused.load() >= 25; }, absl::Seconds(20))) << refused.load();
  // The clients' own copies (1 MB each, some twice) are in this process too.
  if (kMemoryIsMeasurable) {
    EXPECT_LT(Metric("process_resident_memory_bytes") - before, 350 << 20);
  }
  gate_.Open();
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(refused.load() + answered.load(), 60);
  EXPECT_GE(answered.load(), 10);
  EXPECT_EQ(Metric("attnd_requests_in_flight"), 0);
}

}  // namespace
}  // namespace attnd::testing

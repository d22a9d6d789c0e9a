// The gradients through the whole server: through the C++ client, what is refused and with which numbers, chunks,
// cancellation, and that every call is counted once.
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "kernels/reference.h"
#include "tests/service/attend_fixture.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;

class AttendBackwardTest : public AttendFixture {
 protected:
  grpc::Status Call(const v1::AttendBackwardRequest& request, v1::AttendBackwardResponse* response) {
    grpc::ClientContext context;
    return stub_->AttendBackward(&context, request, response);
  }
  grpc::Status RefusedBackward(const v1::AttendBackwardRequest& request) {
    v1::AttendBackwardResponse response;
    grpc::Status status = Call(request, &response);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
    return status;
  }

  // The seed text's p = (1/4, 3/4) and u = (1, 3), with q = 1, so that d_k is the scores' gradient.
  static v1::AttendBackwardRequest Seed() {
    v1::AttendBackwardRequest request;
    request.set_num_queries(1);
    request.set_num_keys(2);
    request.set_head_dim(1);
    *request.mutable_q() = F32({1});
    *request.mutable_k() = F32({0, std::log(3.0f)});
    *request.mutable_v() = F32({1, 3});
    *request.mutable_d_out() = F32({1});
    request.mutable_softmax()->set_softmax_scale(1);
    return request;
  }
};

Floats Normal(int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values(count);
  for (float& x : values) x = normal(random);
  return values;
}

void ExpectNear(const std::vector<float>& actual, const std::vector<double>& expected, const char* name) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  double error = 0, norm = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    error += std::pow(actual[i] - expected[i], 2);
    norm += std::pow(expected[i], 2);
  }
  EXPECT_LE(std::sqrt(error), 1e-5 * std::sqrt(norm)) << name;
}

TEST_F(AttendBackwardTest, SeedNumbers) {
  StartServer();
  v1::AttendBackwardResponse response;
  const grpc::Status status = Call(Seed(), &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const Floats d_k = ToFloats(response.d_k()), d_v = ToFloats(response.d_v());
  ASSERT_EQ(d_k.size(), 2u);
  EXPECT_NEAR(d_k[0], -0.375, 1e-6);
  EXPECT_NEAR(d_k[1], 0.375, 1e-6);
  ASSERT_EQ(d_v.size(), 2u);
  EXPECT_NEAR(d_v[0], 0.25, 1e-6);
  EXPECT_NEAR(d_v[1], 0.75, 1e-6);
  EXPECT_EQ(ToFloats(response.d_q()).size(), 1u);
  EXPECT_EQ(response.d_sinks_size(), 0);
}

// Chunks of 64 tokens cut the tiles' rows (21 tokens and a third each): the bits are those of one chunk.
TEST_F(AttendBackwardTest, EveryOptionThroughTheClientAndInChunks) {
  constexpr int kTokens = 200, kHeads = 6, kKvHeads = 2, kDim = 20, kValueDim = 12;
  const Floats q = Normal(kTokens * kHeads * kDim, 1), k = Normal(kTokens * kKvHeads * kDim, 2),
               v = Normal(kTokens * kKvHeads * kValueDim, 3), d_out = Normal(kTokens * kHeads * kValueDim, 4);
  client::AttendBackwardRequest request;
  request.num_queries = request.num_keys = kTokens;
  request.num_q_heads = kHeads;
  request.num_kv_heads = kKvHeads;
  request.head_dim = kDim;
  request.value_dim = kValueDim;
  request.q = q, request.k = k, request.v = v, request.d_out = d_out;
  request.softmax.softmax_scale = 0.3f;
  request.softmax.softcap = 4.0f;
  request.softmax.causal = true;
  request.softmax.window = 70;
  request.softmax.sinks = {0, 1, -1, 0.5f, 2, -3};
  request.softmax.alibi_slopes = {0.1f, 0.05f, 0.02f, 0.01f, 0, -0.01f};
  request.query_offset = 3;
  request.mask = client::BitMask::Filled(kTokens, kTokens, true);
  for (int i = 0; i < kTokens; ++i) request.mask.Set(i, (i * 7) % kTokens, false);

  std::vector<client::AttendGradients> answers;
  for (const int chunk_tokens : {256, 64}) {
    Options options = DefaultOptions();
    options.prefill_chunk_tokens = chunk_tokens;
    options.compute_threads = chunk_tokens == 64 ? 8 : 1;  // with 8, row tiles and key tiles go apart
    StartServer(options);
    auto client = client::Client::Connect({.target = server_->address()});
    ASSERT_TRUE(client.ok()) << client.status();
    auto answer = client->AttendBackward(request);
    ASSERT_TRUE(answer.ok()) << answer.status();
    answers.push_back(*std::move(answer));
  }
  EXPECT_EQ(answers[0].d_q, answers[1].d_q);
  EXPECT_EQ(answers[0].d_k, answers[1].d_k);
  EXPECT_EQ(answers[0].d_v, answers[1].d_v);
  EXPECT_EQ(answers[0].d_sinks, answers[1].d_sinks);

  SoftmaxOptions softmax;
  softmax.softmax_scale = 0.3f;
  softmax.softcap = 4.0f;
  softmax.window = 70;
  softmax.sinks = request.softmax.sinks.data();
  softmax.alibi_slopes = request.softmax.alibi_slopes.data();
  const MaskView mask{reinterpret_cast<const uint8_t*>(request.mask.bits.data()), kTokens, 0, 0};
  const auto wide = [](const Floats& x) { return std::vector<double>(x.begin(), x.end()); };
  const ReferenceGradients expected = ReferenceBackward(
      {{kHeads, kKvHeads}, kDim, kValueDim, softmax, mask, 3, wide(q), wide(k), wide(v)}, wide(d_out));
  ExpectNear(answers[0].d_q, expected.d_q, "d_q");
  ExpectNear(answers[0].d_k, expected.d_k, "d_k");
  ExpectNear(answers[0].d_v, expected.d_v, "d_v");
  ExpectNear(answers[0].d_sinks, expected.d_sinks, "d_sinks");
}

TEST_F(AttendBackwardTest, ErrorsNameWhatDisagrees) {
  StartServer();
  struct Refusal {
    std::function<void(v1::AttendBackwardRequest*)> change;
    const char* reason;
    std::vector<const char*> words;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  const std::vector<Refusal> refusals = {
      {[](auto* r) { *r->mutable_d_out() = F32({1, 2}); }, "BAD_SHAPE", {"d_out", "8", "4"}},
      {[](auto* r) { r->clear_d_out(); }, "BAD_SHAPE", {"d_out"}},
      {[](auto* r) { r->set_head_dim(0); }, "BAD_SHAPE", {"head_dim", "0"}},
      {[](auto* r) { r->mutable_softmax()->set_causal(true); }, "BAD_SHAPE", {"1", "2", "query_offset"}},
      {[](auto* r) { r->mutable_softmax()->set_window(0); }, "BAD_SHAPE", {"window", "0"}},
      {[&](auto* r) { *r->mutable_q() = F32({nan}); }, "NOT_FINITE", {"q row 0", "head 0", "element 0"}},
      {[&](auto* r) { *r->mutable_k() = F32({0, inf}); }, "NOT_FINITE", {"k row 1"}},
      {[&](auto* r) { *r->mutable_v() = F32({0, -inf}); }, "NOT_FINITE", {"v row 1"}},
      {[&](auto* r) { *r->mutable_d_out() = F32({inf}); }, "NOT_FINITE", {"d_out row 0"}},
      {[](auto* r) {
         r->mutable_mask()->set_rows(1);
         r->mutable_mask()->set_columns(2);
         r->mutable_mask()->set_bits(std::string(1, '\0'));
       },
       "EMPTY_ROW",
       {"query row 0"}},
      {[](auto* r) {
         *r->mutable_v() = F32({3e38f, -3e38f});
         *r->mutable_d_out() = F32({3e38f});
       },
       "GRADIENT_OVERFLOW",
       {"row 0", "head 0"}},
      {[](auto* r) {  // half of 9e38 on the key, and half of that from the sink, twice
         r->set_num_queries(2), r->set_num_keys(1);
         *r->mutable_q() = F32({0, 0});
         *r->mutable_k() = F32({0});
         *r->mutable_v() = F32({3});
         *r->mutable_d_out() = F32({3e38f, 3e38f});
         r->mutable_softmax()->add_sinks(0);
       },
       "GRADIENT_OVERFLOW",
       {"d_sinks", "head 0"}},
  };
  for (const Refusal& refusal : refusals) {
    v1::AttendBackwardRequest request = Seed();
    refusal.change(&request);
    const grpc::Status status = RefusedBackward(request);
    EXPECT_EQ(ReasonOf(status), refusal.reason) << status.error_message();
    for (const char* word : refusal.words) EXPECT_TRUE(absl::StrContains(status.error_message(), word)) << word;
  }
  // The client knows before it is counted.
  EXPECT_TRUE(Eventually([&] { return Handled("AttendBackward", "INVALID_ARGUMENT") == refusals.size(); }));
  v1::AttendBackwardResponse response;
  EXPECT_TRUE(Call(Seed(), &response).ok());
  EXPECT_TRUE(Eventually([&] { return Handled("AttendBackward", "OK") == 1; }));
  EXPECT_EQ(Metric("attnd_rpc_duration_seconds_count{method=\"AttendBackward\"}"), refusals.size() + 1);
  for (const char* gauge : {"attnd_requests_in_flight", "attnd_queue_depth", "attnd_inflight_bytes"}) {
    EXPECT_TRUE(WaitForMetric(gauge, 0)) << gauge;
  }
}

TEST_F(AttendBackwardTest, EmptyRowsCanBeZeros) {
  StartServer();
  v1::AttendBackwardRequest request = Seed();
  request.mutable_mask()->set_rows(1);
  request.mutable_mask()->set_columns(2);
  request.mutable_mask()->set_bits(std::string(1, '\0'));
  request.set_empty_rows(v1::EMPTY_ROWS_ZERO);
  v1::AttendBackwardResponse response;
  ASSERT_TRUE(Call(request, &response).ok());
  EXPECT_EQ(ToFloats(response.d_q()), Floats({0}));
  EXPECT_EQ(ToFloats(response.d_k()), Floats({0, 0}));
  EXPECT_EQ(ToFloats(response.d_v()), Floats({0, 0}));
}

TEST_F(AttendBackwardTest, ScratchAndAnswersAreBounded) {
  Options options = DefaultOptions();
  options.max_message_bytes = 1 << 20;
  options.kv_cache_bytes = 16 << 20;
  StartServer(options);
  // 560 kB in, 1.1 MB out.
  v1::AttendBackwardRequest request;
  request.set_num_queries(1);
  request.set_num_keys(70'000);
  request.set_head_dim(2);
  request.set_value_dim(2);
  *request.mutable_q() = F32({1, 1});
  *request.mutable_d_out() = F32({1, 1});
  request.mutable_k()->set_dtype(v1::DTYPE_BF16);
  request.mutable_k()->mutable_data()->resize(280'000);
  *request.mutable_v() = request.k();
  v1::AttendBackwardResponse response;
  const grpc::Status status = Call(request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(status), "MESSAGE_TOO_LARGE") << status.error_message();

  // 16 bytes for each of 140,000 rows, and 4 for each element of k and v: more than an eighth of the cache.
  request.set_num_queries(140'000);
  request.set_num_keys(1);
  request.set_head_dim(1);
  request.set_value_dim(1);
  for (v1::Tensor* tensor : {request.mutable_q(), request.mutable_d_out()}) {
    tensor->set_dtype(v1::DTYPE_BF16);
    tensor->mutable_data()->assign(280'000, '\0');
  }
  *request.mutable_k() = *request.mutable_v() = F32({1});
  const grpc::Status too_many = Call(request, &response);
  EXPECT_EQ(ReasonOf(too_many), "TOO_MANY_TOKENS") << too_many.error_message();
  EXPECT_TRUE(absl::StrContains(too_many.error_message(), "2240008")) << too_many.error_message();
  EXPECT_TRUE(absl::StrContains(too_many.error_message(), "2097152")) << too_many.error_message();
}

// Given up by its client or by its deadline, while it is queued and between its chunks: no more of it is computed, it
// is counted once, and nothing of it is left.
TEST_F(AttendBackwardTest, CallsThatAreGivenUpLeaveNothing) {
  Options options = DefaultOptions();
  options.prefill_chunk_tokens = 64;
  v1::AttendBackwardRequest request;
  request.set_num_queries(200);  // chunks of 64, 64, 64 and 8
  request.set_num_keys(200);
  request.set_head_dim(4);
  *request.mutable_q() = F32(Normal(800, 1));
  *request.mutable_k() = F32(Normal(800, 2));
  *request.mutable_v() = F32(Normal(800, 3));
  *request.mutable_d_out() = F32(Normal(800, 4));
  for (const bool queued : {true, false}) {
    for (const bool deadline : {false, true}) {
      SCOPED_TRACE(absl::StrCat(queued ? "queued" : "between chunks", deadline ? ", deadline" : ", cancelled"));
      StartServer(options);
      gate_.Close();
      std::thread holder;
      if (queued) {
        holder = std::thread([&] {
          v1::AttendBackwardResponse response;
          EXPECT_TRUE(Call(Seed(), &response).ok());
        });
        gate_.AwaitBatch();
      }
      grpc::ClientContext context;
      // Time enough to get there, which takes milliseconds.
      if (deadline) context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(1500));
      std::thread client([&] {
        v1::AttendBackwardResponse response;
        EXPECT_EQ(stub_->AttendBackward(&context, request, &response).error_code(),
                  deadline ? StatusCode::DEADLINE_EXCEEDED : StatusCode::CANCELLED);
      });
      if (queued) {
        EXPECT_TRUE(WaitForMetric("attnd_queue_depth", 1));
      } else {
        gate_.AwaitBatch();
        gate_.PassOne();
        gate_.AwaitBatch();
      }
      if (!deadline) context.TryCancel();
      client.join();
      // While compute is held up: the server knows, too, before it goes on.
      EXPECT_TRUE(WaitForMetric("attnd_requests_in_flight", queued ? 1 : 0));
      gate_.Open();
      if (holder.joinable()) holder.join();
      for (const char* gauge :
           {"attnd_requests_in_flight", "attnd_queue_depth", "attnd_queue_tokens", "attnd_inflight_bytes"}) {
        EXPECT_TRUE(WaitForMetric(gauge, 0)) << gauge;
      }
      const char* const stage = queued ? "queued" : "computing";
      EXPECT_TRUE(WaitForMetric(absl::StrCat("attnd_cancelled_total{stage=\"", stage, "\"}"), 1));
      // At a deadline both ends give up, and the server may hear of the client's end first.
      EXPECT_TRUE(Eventually([&] {
        return Handled("AttendBackward", "CANCELLED") +
                   (deadline ? Handled("AttendBackward", "DEADLINE_EXCEEDED") : 0) ==
               1;
      }));
      // The other call's, or the two that were let in.
      EXPECT_EQ(Metric("attnd_batch_segments_count"), queued ? 1 : 2);
      v1::AttendBackwardResponse response;
      EXPECT_TRUE(Call(request, &response).ok());
    }
  }
}

}  // namespace
}  // namespace attnd::testing

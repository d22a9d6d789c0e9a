// Sessions under load, against a server that is one thread: what is counted, from when, and what is never left out.
#include "client/attnload/load.h"

#include <gtest/gtest.h>

#include <memory>

#include "absl/strings/match.h"
#include "client/attnload/executor.h"
#include "tests/unit/attnload/fake_backend.h"

namespace attnd::attnload {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

LoadOptions Options() {
  LoadOptions options;
  options.plan.config = {.num_layers = 1, .num_q_heads = 4, .num_kv_heads = 2, .head_dim = 8};
  options.plan.prefill_tokens = options.plan.prefill_chunk = 1;
  options.plan.decode_tokens = 0;
  options.plan.check_rate = 0;
  options.arrivals = ArrivalKind::kConstant;
  options.rate = 100;
  options.duration = seconds(1);
  return options;
}

struct Harness {
  explicit Harness(Nanos service_time) : backend(service_time), executor(2), pool(1, 1024) {}

  Results Run(const LoadOptions& options, Nanos stall_after = Nanos(0), Nanos stall = Nanos(0)) {
    load = std::make_unique<Load>(options, &pool, &backend, &executor);
    if (stall > Nanos(0)) backend.StallAt(load->start() + stall_after, stall);
    load->Start();
    EXPECT_TRUE(load->Wait(seconds(60)));
    Results results = load->Finish();
    executor.Stop();
    return results;
  }

  FakeBackend backend;
  Executor executor;
  TensorPool pool;
  std::unique_ptr<Load> load;
};

// Every mean is a sum over the same calls, so the parts have to add up to the whole.
void ExpectPartsAddUp(const CallFigures& f) {
  EXPECT_NEAR(f.latency.MeanSeconds(),
              f.dependency_wait.MeanSeconds() + f.client_wait.MeanSeconds() + f.service.MeanSeconds(), 1e-8);
}

// L01 in small: arrivals go on while the server stands still, and each of them has waited since its own time.
TEST(LoadTest, AStalledServerShowsInTheArrivalsThatItKeptWaiting) {
  LoadOptions options = Options();
  options.duration = seconds(2);
  Harness h(Nanos(100'000));
  const Results r = h.Run(options, milliseconds(800), milliseconds(500));
  EXPECT_EQ(r.first_output.count(), 200);  // none left out, none too many
  EXPECT_EQ(r.sessions.arrived, 200);
  EXPECT_EQ(r.sessions.completed, 200);
  EXPECT_GE(r.first_output.max(), milliseconds(480));
  EXPECT_GE(r.first_output.Quantile(0.99), milliseconds(440));
  // A quarter of the arrivals fell into the stall, the first of them for all of it, the last for none.
  EXPECT_GE(r.first_output.Quantile(0.88), milliseconds(200));
  EXPECT_LE(r.first_output.Quantile(0.5), milliseconds(200));
  for (const CallFigures& f : r.calls) ExpectPartsAddUp(f);
}

// The same within a session: its steps depend on each other, yet each is late by its own intended time.
TEST(LoadTest, APacedSessionCountsTheStepsThatItCouldNotSend) {
  LoadOptions options = Options();
  options.rate = 0.1;  // one session
  options.duration = seconds(2);
  options.plan.decode_tokens = 1000;
  options.decode_interval = milliseconds(10);
  Harness h(Nanos(100'000));
  const Results r = h.Run(options, milliseconds(800), milliseconds(500));
  const CallFigures& decode = r.of(CallKind::kDecode);
  EXPECT_NEAR(static_cast<double>(decode.latency.count()), 200, 2);
  EXPECT_GE(decode.latency.Quantile(0.99), milliseconds(440));
  EXPECT_GE(decode.latency.Quantile(0.88), milliseconds(200));
  // One step alone was in the server meanwhile: whoever counts from sending sees next to nothing.
  EXPECT_LE(decode.service.Quantile(0.95), milliseconds(100));
  EXPECT_GE(decode.dependency_wait.max(), milliseconds(440));
  ExpectPartsAddUp(decode);
  EXPECT_EQ(r.sessions.cut, 1);
  EXPECT_EQ(h.backend.open_sessions(), 0);
  EXPECT_EQ(h.backend.bad_positions(), 0);
}

TEST(LoadTest, WithoutAPaceAStepIsIntendedWhenTheAnswerBeforeItCame) {
  LoadOptions options = Options();
  options.rate = 10;
  options.plan.decode_tokens = 5;
  Harness h(Nanos(100'000));
  const Results r = h.Run(options);
  EXPECT_GT(r.of(CallKind::kDecode).latency.count(), 0);
  EXPECT_EQ(r.of(CallKind::kDecode).dependency_wait.max(), Nanos(0));
  EXPECT_EQ(r.sessions.completed + r.sessions.cut, 10);
}

TEST(LoadTest, ArrivalsBeyondTheLimitWaitAndAreCountedAsWaiting) {
  LoadOptions options = Options();
  options.max_sessions = 1;  // of three calls of 5 ms each: 66 per second at most
  Harness h(milliseconds(5));
  const Results r = h.Run(options);
  EXPECT_EQ(r.sessions.arrived, 100);
  EXPECT_EQ(r.sessions.completed, 100);
  EXPECT_EQ(r.sessions.most_at_once, 1);
  const CallFigures& create = r.of(CallKind::kCreate);
  EXPECT_EQ(create.latency.count(), 100);
  EXPECT_GE(create.client_wait.max(), milliseconds(300));
  EXPECT_EQ(create.dependency_wait.max(), Nanos(0));
  EXPECT_LE(create.service.Quantile(0.5), milliseconds(50));
  ExpectPartsAddUp(create);
}

TEST(LoadTest, TheWarmUpIsInNoFigure) {
  LoadOptions options = Options();
  options.warmup = milliseconds(500);
  options.duration = milliseconds(500);
  Harness h(Nanos(100'000));
  const Results r = h.Run(options);
  EXPECT_EQ(r.sessions.arrived, 100);
  EXPECT_EQ(r.first_output.count(), 50);
  EXPECT_EQ(r.of(CallKind::kCreate).latency.count(), 50);
}

TEST(LoadTest, AWrongAnswerIsFoundAndNamed) {
  LoadOptions options = Options();
  options.plan.decode_tokens = 3;
  Harness h(Nanos(50'000));
  h.backend.corrupt_every = 100;
  const Results r = h.Run(options);
  EXPECT_GE(r.checks.wrong, 2);
  ASSERT_FALSE(r.checks.mismatches.empty());
  const std::string& first = r.checks.mismatches[0];
  for (const char* part : {"session fake-", "layer 0", "position ", "head 0", "element 7", "expected ", "got "}) {
    EXPECT_TRUE(absl::StrContains(first, part)) << first;
  }
}

TEST(LoadTest, RightAnswersAreCounted) {
  Harness h(Nanos(50'000));
  const Results r = h.Run(Options());
  EXPECT_EQ(r.checks.constant_rows, 400);  // 100 sessions, a token of 4 heads each
  EXPECT_EQ(r.checks.wrong, 0);
  EXPECT_EQ(r.checks.max_error, 0);
}

TEST(LoadTest, CancelledStepsAreSentAgainAtTheSamePlace) {
  LoadOptions options = Options();
  options.rate = 50;
  options.plan.decode_tokens = 10;
  options.plan.cancel_rate = 0.5;
  Harness h(Nanos(300'000));
  const Results r = h.Run(options);
  EXPECT_GT(r.of(CallKind::kDecode).cancelled, 10);
  EXPECT_EQ(h.backend.bad_positions(), 0);
  EXPECT_EQ(r.sessions.failed, 0);
  EXPECT_TRUE(r.errors.empty());
  EXPECT_EQ(r.checks.wrong, 0);
  EXPECT_GT(h.backend.streamed(), 0);  // those that are not cancelled
}

TEST(LoadTest, AbandonedSessionsAreLeftOpen) {
  LoadOptions options = Options();
  options.plan.decode_tokens = 3;
  options.plan.abandon_rate = 0.3;
  Harness h(Nanos(50'000));
  const Results r = h.Run(options);
  EXPECT_NEAR(static_cast<double>(r.sessions.abandoned), 30, 20);
  EXPECT_EQ(h.backend.open_sessions(), r.sessions.abandoned);
  EXPECT_EQ(r.sessions.failed, 0);
}

TEST(LoadTest, ARejectedStepEndsItsSessionUnlessItMayTryAgain) {
  LoadOptions options = Options();
  options.plan.decode_tokens = 3;
  Harness once(Nanos(50'000)), again(Nanos(50'000));
  once.backend.reject_every = again.backend.reject_every = 50;
  const Results r = once.Run(options);
  EXPECT_GT(r.sessions.failed, 0);
  EXPECT_EQ(r.errors.at("RESOURCE_EXHAUSTED"), r.sessions.failed);
  EXPECT_EQ(once.backend.open_sessions(), 0);  // they were closed
  options.retries = 3;
  const Results retried = again.Run(options);
  EXPECT_EQ(retried.sessions.failed, 0);
  EXPECT_GT(retried.errors.at("RESOURCE_EXHAUSTED"), 0);
}

TEST(LoadTest, StoppedEarlyItClosesItsSessions) {
  LoadOptions options = Options();
  options.duration = std::chrono::hours(1);
  options.plan.decode_tokens = 1 << 20;
  options.decode_interval = milliseconds(20);
  options.rate = 20;
  Harness h(Nanos(50'000));
  h.load = std::make_unique<Load>(options, &h.pool, &h.backend, &h.executor);
  h.load->Start();
  EXPECT_FALSE(h.load->Wait(milliseconds(500)));
  h.load->Stop();
  EXPECT_TRUE(h.load->Wait(seconds(30)));
  const Results r = h.load->Finish();
  h.executor.Stop();
  EXPECT_GT(r.sessions.cut, 0);
  EXPECT_EQ(h.backend.open_sessions(), 0);
}

}  // namespace
}  // namespace attnd::attnload

// Pipelined steps against a stand-in server.
#include "client/cpp/step_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "tests/unit/client/fake_server.h"

namespace attnd::client {
namespace {

using ::attnd::FakeServer;

const std::vector<float> kZero = {0.0f};

class StepStreamTest : public ::testing::Test {
 protected:
  StepStreamTest() : client_(*Client::Connect({.target = server_.target()})), session_(*client_.CreateSession({})) {}

  absl::StatusOr<uint64_t> Send(StepStream* stream, float value) {
    const std::vector<float> v = {value};
    return stream->Send(*session_.MakeStep(0, kZero, kZero, v));
  }

  FakeServer server_;
  Client client_;
  Session session_;
};

// S10: answer i is the mean of 1..i, so it shows both order and loss.
TEST_F(StepStreamTest, AnswersMatchTheirRequests) {
  std::unique_ptr<StepStream> stream = client_.OpenStepStream({.window = 16});
  std::vector<uint64_t> ids;
  for (int i = 1; i <= 200; ++i) {
    absl::StatusOr<uint64_t> id = Send(stream.get(), static_cast<float>(i));
    ASSERT_TRUE(id.ok()) << id.status();
    ids.push_back(*id);
  }
  for (int i = 200; i >= 1; --i) {  // claimed in another order than sent
    absl::StatusOr<StepResult> result = stream->Wait(ids[i - 1]);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_FLOAT_EQ(result->out.As<float>()[0], static_cast<float>(i + 1) / 2);
    EXPECT_EQ(result->segments[0].length, i);
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(absl::IsNotFound(stream->Wait(ids[0]).status()));
  EXPECT_FALSE(Send(stream.get(), 1).ok());
}

TEST_F(StepStreamTest, AStepsErrorDoesNotEndTheStream) {
  std::unique_ptr<StepStream> stream = client_.OpenStepStream();
  StepRequest unknown = *session_.MakeStep(0, kZero, kZero, kZero);
  unknown.segments[0].session_id = "nobody";
  const absl::Status status = stream->Wait(*stream->Send(unknown)).status();
  EXPECT_TRUE(IsSessionLost(status)) << status;
  EXPECT_TRUE(stream->Wait(*Send(stream.get(), 1)).ok());
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StepStreamTest, SendWaitsForRoomInTheWindow) {
  std::unique_ptr<StepStream> stream = client_.OpenStepStream({.window = 2});
  server_.faults().delay_ms = 100;
  const absl::Time start = absl::Now();
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Send(stream.get(), 1).ok());
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(150));  // the fourth had to wait for the second's answer
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(StepStreamTest, APausedServerIsADeadline) {
  std::unique_ptr<StepStream> stream = client_.OpenStepStream({.window = 1, .step_timeout = absl::Milliseconds(100)});
  server_.faults().delay_ms = 500;
  absl::StatusOr<uint64_t> first = Send(stream.get(), 1);
  ASSERT_TRUE(first.ok());
  EXPECT_TRUE(absl::IsDeadlineExceeded(Send(stream.get(), 2).status()));
  EXPECT_TRUE(absl::IsDeadlineExceeded(stream->Wait(*first).status()));
  EXPECT_FALSE(Send(stream.get(), 3).ok());
}

TEST_F(StepStreamTest, ALostConnectionAnswersWhatIsInFlight) {
  std::unique_ptr<StepStream> stream = client_.OpenStepStream();
  server_.faults().delay_ms = 1000;
  absl::StatusOr<uint64_t> id = Send(stream.get(), 1);
  ASSERT_TRUE(id.ok());
  absl::SleepFor(absl::Milliseconds(100));
  server_.Stop();
  EXPECT_FALSE(stream->Wait(*id).ok());
  EXPECT_FALSE(stream->Finish().ok());
}

TEST_F(StepStreamTest, CancelAndDestructionDoNotHang) {
  for (bool explicitly : {true, false}) {
    std::unique_ptr<StepStream> stream = client_.OpenStepStream();
    server_.faults().delay_ms = 200;
    absl::StatusOr<uint64_t> id = Send(stream.get(), 1);
    if (!explicitly) continue;
    stream->Cancel();
    EXPECT_TRUE(absl::IsCancelled(stream->Wait(*id).status()));
  }
}

TEST_F(StepStreamTest, ManyThreadsShareOneStream) {
  std::unique_ptr<StepStream> stream = client_.OpenStepStream({.window = 4});
  std::vector<std::thread> threads;
  std::atomic<int> answered{0};
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 25; ++i) {
        if (stream->Wait(*Send(stream.get(), 1)).ok()) ++answered;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(answered, 200);
  EXPECT_EQ(session_.Get()->layer_lengths[0], 200);
}

// ---- without waiting

TEST_F(StepStreamTest, PromisesAreKeptInOrderWhateverTheWindow) {
  std::unique_ptr<StepStream> stream = client_.OpenStepStream({.window = 1});
  const std::vector<float> v = {1.0f};
  std::mutex mutex;
  std::vector<int64_t> lengths;
  std::vector<std::chrono::steady_clock::time_point> sent;
  absl::BlockingCounter all(50);
  const auto before = std::chrono::steady_clock::now();
  for (int i = 0; i < 50; ++i) {
    stream->SendAsync(*session_.MakeStep(0, kZero, kZero, v),
                      [&](absl::StatusOr<StepResult> result, std::chrono::steady_clock::time_point when) {
                        std::lock_guard<std::mutex> lock(mutex);
                        lengths.push_back(result.ok() ? result->segments[0].length : -1);
                        sent.push_back(when);
                        all.DecrementCount();
                      });
  }
  all.Wait();
  EXPECT_TRUE(std::is_sorted(lengths.begin(), lengths.end()));
  EXPECT_EQ(lengths.front(), 1);
  EXPECT_EQ(lengths.back(), 50);
  EXPECT_TRUE(std::is_sorted(sent.begin(), sent.end()));
  EXPECT_GE(sent.front(), before);
  EXPECT_TRUE(stream->open());
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_FALSE(stream->open());
}

TEST_F(StepStreamTest, PromisesAreBrokenOnceByWhateverEndsTheStream) {
  for (const bool by_server : {true, false}) {
    std::unique_ptr<StepStream> stream = client_.OpenStepStream();
    server_.faults().delay_ms = 300;
    std::atomic<int> broken{0};
    absl::BlockingCounter all(3);
    const auto done = [&](absl::StatusOr<StepResult> result, std::chrono::steady_clock::time_point /*sent*/) {
      broken += !result.ok();
      all.DecrementCount();
    };
    for (int i = 0; i < 3; ++i) stream->SendAsync(*session_.MakeStep(0, kZero, kZero, kZero), done);
    absl::SleepFor(absl::Milliseconds(50));
    if (by_server) {
      server_.Stop();
    } else {
      stream->Cancel();
    }
    all.Wait();
    EXPECT_EQ(broken, 3);
    EXPECT_FALSE(stream->open());
    absl::Notification refused;  // and one that comes too late, at once
    stream->SendAsync(*session_.MakeStep(0, kZero, kZero, kZero),
                      [&](absl::StatusOr<StepResult> result, std::chrono::steady_clock::time_point sent) {
                        EXPECT_FALSE(result.ok());
                        EXPECT_EQ(sent, std::chrono::steady_clock::time_point());
                        refused.Notify();
                      });
    EXPECT_TRUE(refused.HasBeenNotified());
    if (by_server) server_.Restart();
  }
}

}  // namespace
}  // namespace attnd::client

// Order and time of tasks, and the gate that makes them wait.
#include "client/attnload/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <mutex>
#include <vector>

#include "client/attnload/gate.h"

namespace attnd::attnload {
namespace {

using std::chrono::milliseconds;

TEST(ExecutorTest, RunsWhatIsDueInTheOrderOfItsTime) {
  Executor executor(1);
  std::vector<int> order;
  std::promise<void> all;
  const TimePoint start = Clock::now() + milliseconds(20);
  executor.At(start + milliseconds(10), [&] { order.push_back(3); });
  executor.At(start, [&] { order.push_back(1); });
  executor.At(start, [&] { order.push_back(2); });
  executor.At(start + milliseconds(20), [&] { all.set_value(); });
  all.get_future().wait();
  EXPECT_GE(Clock::now() - start, milliseconds(20));
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
}

TEST(ExecutorTest, AnEarlierTaskWakesASleeper) {
  Executor executor(2);
  std::promise<void> done;
  executor.At(Clock::now() + std::chrono::hours(1), [] {});
  std::this_thread::sleep_for(milliseconds(20));  // so that the threads sleep until then
  executor.Now([&] { done.set_value(); });
  EXPECT_EQ(done.get_future().wait_for(std::chrono::seconds(10)), std::future_status::ready);
}

TEST(ExecutorTest, ABusyThreadDoesNotHoldUpTheOthers) {
  Executor executor(2);
  std::promise<void> release, done;
  executor.Now([&] { release.get_future().wait(); });
  for (int i = 0; i < 100; ++i) executor.Now([] {});
  executor.Now([&] { done.set_value(); });
  EXPECT_EQ(done.get_future().wait_for(std::chrono::seconds(10)), std::future_status::ready);
  release.set_value();
}

TEST(ExecutorTest, ManyTasksFromManyThreadsAllRun) {
  std::atomic<int> ran = 0;
  {
    Executor executor(3);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 5000; ++i) executor.Now([&] { ++ran; });
      });
    }
    for (std::thread& thread : threads) thread.join();
    while (ran < 20000) std::this_thread::yield();
  }
  EXPECT_EQ(ran, 20000);
}

TEST(GateTest, LetsSoManyInAndTheOthersInOrder) {
  Executor executor(1);
  Gate gate(&executor, 2);
  std::mutex mutex;
  std::vector<int> entered;
  std::promise<void> fourth;
  for (int i = 1; i <= 4; ++i) {
    gate.Enter([&, i] {
      std::lock_guard<std::mutex> lock(mutex);
      entered.push_back(i);
      if (i == 4) fourth.set_value();
    });
  }
  {
    std::lock_guard<std::mutex> lock(mutex);
    EXPECT_EQ(entered, (std::vector<int>{1, 2}));
  }
  gate.Leave();
  gate.Leave();
  fourth.get_future().wait();
  EXPECT_EQ(entered, (std::vector<int>{1, 2, 3, 4}));
}

}  // namespace
}  // namespace attnd::attnload

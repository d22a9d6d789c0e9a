#include "server/engine/worker_pool.h"

#include <sys/resource.h>
#include <unistd.h>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace attnd {
namespace {

int Niceness() { return getpriority(PRIO_PROCESS, static_cast<id_t>(gettid())); }

TEST(WorkerPool, WorkersGiveWayAndTheCallerDoesNot) {
  constexpr int kThreads = 2;
  const int caller = Niceness();
  WorkerPool pool(kThreads);
  absl::Mutex mutex;
  int arrived = 0;
  int niceness[kThreads] = {};
  pool.Run(kThreads, [&](int64_t task, int) {
    niceness[task] = Niceness();
    // Each task keeps its thread until the other one has one, too.
    absl::MutexLock lock(&mutex);
    ++arrived;
    const auto all = [&] { return arrived == kThreads; };
    EXPECT_TRUE(mutex.AwaitWithTimeout(absl::Condition(&all), absl::Seconds(30)));
  });
  EXPECT_THAT(niceness, testing::UnorderedElementsAre(caller, testing::Gt(caller)));
  EXPECT_EQ(Niceness(), caller);
}

}  // namespace
}  // namespace attnd

// One run of open-loop load: arrivals by the schedule, each a session that lives its plan.
#ifndef ATTND_CLIENT_ATTNLOAD_LOAD_H_
#define ATTND_CLIENT_ATTNLOAD_LOAD_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "client/attnload/arrivals.h"
#include "client/attnload/backend.h"
#include "client/attnload/checker.h"
#include "client/attnload/data.h"
#include "client/attnload/executor.h"
#include "client/attnload/plan.h"
#include "client/attnload/recorder.h"

namespace attnd::attnload {

struct LoadOptions {
  PlanOptions plan;
  ArrivalKind arrivals = ArrivalKind::kPoisson;
  double rate = 10;             // sessions per second
  Nanos warmup{0};              // before the window that is measured
  Nanos duration{0};            // of that window
  Nanos decode_interval{0};     // of a session's tokens; 0: the next step follows the answer
  int64_t max_sessions = 1024;  // at once; arrivals beyond it wait
  int64_t retries = 0;          // of a rejected call, after the delay that the server asks for
};

class Session;

// Thread-safe where it says so; Start and Wait are for one thread.
class Load {
 public:
  // All three outlive the load, whose sessions run on the executor: stop that before the load goes.
  Load(const LoadOptions& options, const TensorPool* pool, Backend* backend, Executor* executor);
  ~Load();

  void Start();
  // Ends the run early: no more arrivals, sessions close at their next step. Thread-safe.
  void Stop();
  // True once every session has ended, or after `timeout`.
  bool Wait(Nanos timeout);

  TimePoint start() const { return start_; }
  TimePoint end() const { return TimePoint(Nanos(end_.load())); }  // of the window, thread-safe
  int64_t active() const;                                          // sessions now, thread-safe
  int64_t waiting() const;                                         // arrivals beyond max_sessions, thread-safe
  bool stopped() const;                                            // thread-safe
  const Recorder& recorder() const { return recorder_; }
  Results Finish();  // REQUIRES: Wait() was true

 private:
  friend class Session;
  void NextArrival();
  void Arrive(int64_t number, TimePoint intended);
  void Begin(int64_t number, TimePoint intended);
  void SessionEnded();

  const LoadOptions options_;
  const TensorPool* const pool_;
  Backend* const backend_;
  Executor* const executor_;
  const TimePoint start_;
  std::atomic<int64_t> end_;  // since the clock's epoch, in ns
  Recorder recorder_;
  Checker checker_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  Arrivals arrivals_;
  int64_t next_number_ = 0;
  int64_t active_ = 0;
  bool arriving_ = true;  // the schedule has more
  bool stopped_ = false;
  struct Waiting {
    int64_t number;
    TimePoint intended;
  };
  std::deque<Waiting> waiting_;
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_LOAD_H_

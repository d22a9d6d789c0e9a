// What a run found out: counts, histograms and a line per second, gathered from every call.
#ifndef ATTND_CLIENT_ATTNLOAD_RECORDER_H_
#define ATTND_CLIENT_ATTNLOAD_RECORDER_H_

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/attnload/check.h"
#include "client/attnload/clock.h"
#include "client/attnload/histogram.h"

namespace attnd::attnload {

enum class CallKind : uint8_t { kCreate, kPrefill, kDecode, kClose };
inline constexpr size_t kCallKinds = 4;
const char* Name(CallKind kind);

// One call, as it ended. intended <= ready <= sent <= answered, and
//   answered - intended = (ready - intended) + (sent - ready) + (answered - sent)
//        latency        =   dependency wait  +  client wait   +     service time
struct CallRecord {
  CallKind kind;
  TimePoint intended = {};  // when the schedule wanted it sent
  TimePoint ready = {};  // when nothing of the server's stood in the way any more: the answer that it follows was there
  TimePoint sent = {};
  TimePoint answered = {};
  absl::Status status = {};
  bool cancelled = false;  // on purpose, and the cancellation won
  int64_t tokens = 0;      // of a step
  Nanos queue{0};          // as the server says, of steps that succeeded
  Nanos compute{0};
};

// The calls of one kind that succeeded, and how the others ended.
struct CallFigures {
  Histogram latency, service, client_wait, dependency_wait, queue, compute, outside;
  Histogram rejected;  // latency of RESOURCE_EXHAUSTED, from when it was sent
  int64_t failed = 0;  // neither OK nor rejected nor cancelled on purpose
  int64_t cancelled = 0;

  int64_t ended() const { return latency.count() + rejected.count() + failed + cancelled; }
};

// One second of the run. Latencies are those of the calls intended in it, counts those of the answers that came in it.
struct Second {
  Histogram step{5}, first_output{5}, client_wait{5};
  int64_t steps = 0, tokens = 0, sessions = 0, rejected = 0, failed = 0;
};

struct CheckFigures {
  int64_t constant_rows = 0, reference_rows = 0;
  int64_t skipped = 0;  // steps chosen for the reference while it had too much to do
  int64_t wrong = 0;    // answers
  double max_error = 0;
  std::vector<std::string> mismatches;  // the first of them, in words
};

struct SessionFigures {
  int64_t arrived = 0;    // by the schedule
  int64_t completed = 0;  // all of their steps, and closed
  int64_t cut = 0;        // closed early because the run was over
  int64_t abandoned = 0;  // on purpose
  int64_t failed = 0;     // a call failed or was rejected
  int64_t most_at_once = 0;
};

struct Results {
  std::array<CallFigures, kCallKinds> calls;        // that were intended within the measured window
  Histogram first_output;                           // from a session's arrival to the last answer of its prefill
  std::map<std::string, int64_t> errors;            // "CODE" or "CODE (REASON)" -> calls, within the window
  int64_t measured_steps = 0, measured_tokens = 0;  // answered within the window
  SessionFigures sessions;                          // all, the warm-up's as well
  CheckFigures checks;
  std::vector<Second> seconds;  // from the start of the warm-up

  const CallFigures& of(CallKind kind) const { return calls[static_cast<size_t>(kind)]; }
};

// Thread-safe.
class Recorder {
 public:
  // The window is [start + warmup, end).
  Recorder(TimePoint start, TimePoint measure_from, TimePoint end) : start_(start), from_(measure_from), end_(end) {}

  void Call(const CallRecord& record);
  void FirstOutput(TimePoint intended, TimePoint answered);
  void Check(CheckKind kind, const std::string& session_id, int64_t session, const CheckOutcome& outcome);
  void CheckSkipped();
  // Changes the counts of sessions.
  template <class Change>
  void Sessions(Change change) {
    std::lock_guard<std::mutex> lock(mutex_);
    change(&results_.sessions);
  }
  // The run ends earlier than planned.
  void EndAt(TimePoint end);

  // Usual service time of a kind of call, so far: a running mean.
  Nanos Usual(CallKind kind) const;

  Results Get() const;
  // For the line of progress: sums so far, and one finished second.
  struct Glance {
    int64_t steps = 0, tokens = 0, rejected = 0, failed = 0, wrong = 0;
    Nanos p50{0}, p99{0};
  };
  Glance At(int64_t second) const;

 private:
  Second& SecondOf(TimePoint time);
  bool Measured(TimePoint intended) const { return intended >= from_ && intended < end_; }

  const TimePoint start_, from_;
  mutable std::mutex mutex_;
  TimePoint end_;
  Results results_;
  std::array<double, kCallKinds> usual_seconds_ = {};
};

// "RESOURCE_EXHAUSTED (QUEUE_FULL)".
std::string ErrorName(const absl::Status& status);

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_RECORDER_H_

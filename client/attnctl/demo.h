// The demo's run: concurrent sessions in rounds, each round measured and then checked.
//
// A round is a list of steps that every session makes in order while all sessions run at once: one prefill of one
// layer, or up to 64 tokens of decode through all layers. What a round sends is made before its clock starts; its
// answers are kept and checked in float64 after its clock has stopped, so the check never takes time from what is
// measured.
#ifndef ATTND_CLIENT_ATTNCTL_DEMO_H_
#define ATTND_CLIENT_ATTNCTL_DEMO_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "client/attnctl/progress_bar.h"
#include "client/cpp/client.h"

namespace attnd::attnctl {

struct DemoOptions {
  int64_t sessions = 8;
  client::SessionConfig config;
  int64_t prefill = 512;  // tokens
  int64_t decode = 64;
  int64_t prefill_chunk = 512;  // tokens of one prefill step
  bool stream = false;          // StepStream instead of unary Step
  uint64_t seed = 1;
};

// One kind of step, over the whole run.
struct PhaseResult {
  int64_t tokens = 0;  // that went through all layers
  absl::Duration time;
  std::vector<absl::Duration> latencies;  // of each step
};

struct CheckResult {
  int64_t rows = 0;      // output rows compared
  double max_error = 0;  // ||out - ref|| / ||ref|| of the worst row; infinite if one was not finite
  std::string worst;     // where that was
};

struct DemoStep {
  int layer;
  int64_t position;
  int64_t tokens;
};

class Demo {
 public:
  Demo(const Client& client, const DemoOptions& options) : client_(client), options_(options) {}

  absl::Status OpenSessions();
  // Everything between: fills the results below.
  absl::Status Run(ProgressBar* bar);
  absl::Status CloseSessions();

  const PhaseResult& prefill() const { return prefill_; }
  const PhaseResult& decode() const { return decode_; }
  const CheckResult& check() const { return check_; }
  absl::Duration check_time() const { return check_time_; }
  int64_t waits() const { return waits_; }  // steps sent again after RESOURCE_EXHAUSTED with a delay

  int64_t expected_rows() const;
  int64_t total_work() const;  // what the progress bar counts to
  // The numeric contract's bound for the session's KV dtype.
  double error_bound() const;

 private:
  struct Lane;  // one session's part of a round
  absl::Status RunRound(const std::vector<DemoStep>& steps, PhaseResult* phase, ProgressBar* bar);
  void CheckRound(const std::vector<DemoStep>& steps, const std::vector<Lane>& lanes, ProgressBar* bar);
  absl::Status CheckLengths();

  const Client client_;
  const DemoOptions options_;
  std::vector<client::Session> sessions_;
  PhaseResult prefill_, decode_;
  CheckResult check_;
  absl::Duration check_time_;
  int64_t waits_ = 0;
};

}  // namespace attnd::attnctl

#endif  // ATTND_CLIENT_ATTNCTL_DEMO_H_

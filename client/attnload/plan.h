// What one session will do, decided before it starts: its steps in order, and which of them go wrong on purpose. A
// function of the seed and the session's number, so that two runs with one seed ask the same of the server.
#ifndef ATTND_CLIENT_ATTNLOAD_PLAN_H_
#define ATTND_CLIENT_ATTNLOAD_PLAN_H_

#include <cstdint>
#include <optional>

#include "client/cpp/types.h"

namespace attnd::attnload {

struct PlanOptions {
  client::SessionConfig config;
  int64_t prefill_tokens = 512;  // >= 1
  int64_t prefill_chunk = 512;   // tokens of one prefill step at most
  int64_t decode_tokens = 64;
  double check_rate = 0.05;  // share of sessions that are compared with float64
  double cancel_rate = 0;    // share of steps that are cancelled in flight
  double abandon_rate = 0;   // share of sessions that are left without a word
  uint64_t seed = 1;
};

struct PlannedStep {
  bool prefill = false;
  int layer = 0;
  int64_t position = 0;  // of its first token
  int64_t tokens = 0;
  int64_t decode_index = 0;  // of decode steps, counted through layers and tokens; the pace's unit
};

// How a session's answers are checked.
enum class CheckKind : uint8_t {
  kConstant,   // every row of V is one constant per layer and kv head, so every output row has to be that constant
  kReference,  // V is random, and some rows are compared with attention in float64
};

class Plan {
 public:
  Plan(const PlanOptions& options, int64_t session);

  int64_t steps() const { return prefill_steps_ + options_->decode_tokens * options_->config.num_layers; }
  // A chunk of the prefill, or a token, passes through all layers before the next one begins.
  PlannedStep StepAt(int64_t index) const;
  bool IsLastPrefill(int64_t index) const { return index == prefill_steps_ - 1; }

  int64_t session() const { return session_; }
  CheckKind check() const { return check_; }
  // Reference sessions: whether this step's answer is one of those compared, and on which kv head.
  std::optional<int> ReferenceHead(int64_t index) const;
  // The step in the midst of which the session is left.
  std::optional<int64_t> abandon_at() const { return abandon_at_; }
  bool Cancels(int64_t index) const;
  // In [0, 1): when within the usual time of such a step the cancellation comes.
  double CancelMoment(int64_t index) const;

  // Of kConstant sessions. Exact in every dtype, and at least 6 % apart where they differ.
  float Constant(int layer, int kv_head) const;

 private:
  const PlanOptions* options_;
  int64_t session_;
  uint64_t seed_;
  int64_t prefill_steps_;
  CheckKind check_;
  std::optional<int64_t> abandon_at_;
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_PLAN_H_

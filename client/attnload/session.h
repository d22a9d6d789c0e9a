// One session under load, as a chain of calls: create, its steps in order, close. Each link runs on the executor when
// the one before it was answered and its intended time has come.
#ifndef ATTND_CLIENT_ATTNLOAD_SESSION_H_
#define ATTND_CLIENT_ATTNLOAD_SESSION_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "client/attnload/load.h"

namespace attnd::attnload {

// Kept alive by its pending link. One link at a time, so it needs no lock.
class Session : public std::enable_shared_from_this<Session> {
 public:
  Session(Load* load, int64_t number, TimePoint arrival);
  void Start();

 private:
  enum class End : uint8_t { kCompleted, kCut, kAbandoned, kFailed };

  void Created(absl::StatusOr<std::string> id, CallTimes times);
  void PlanNextStep();
  void SendStep();
  void BuildRequest();
  void ArmCancel();
  void StepAnswered(absl::StatusOr<client::StepResult> result, CallTimes times);
  void StepFailed(const absl::Status& status);
  void CheckAnswer(client::Tensor out);
  void Close(End end);
  void Finish(End end);
  // Tries the rejected call again after a while; false: it has had its chances.
  bool Retry(const absl::Status& status, void (Session::*call)());
  void Record(CallKind kind, const CallTimes& times, const absl::Status& status, const client::StepResult* result);
  TimePoint DecodeDue(int64_t decode_index) const;

  Load* const load_;
  const Plan plan_;
  const TimePoint arrival_;
  std::string id_;
  int64_t next_ = 0;  // step
  PlannedStep step_;
  TimePoint intended_;         // of the call that comes next or is under way
  TimePoint answered_before_;  // when the one before it was answered
  TimePoint decode_start_;     // the pace's origin: the end of the prefill
  int64_t tries_ = 0;
  client::StepRequest request_;
  std::vector<float> constant_v_;
  bool step_cancels_ = false;   // the call under way gets cancelled
  bool step_abandons_ = false;  // and the session is left then
  bool was_cancelled_ = false;  // this step once was, so that it goes through the second time
  std::stop_source cancel_;
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_SESSION_H_

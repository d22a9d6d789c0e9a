// A server that is one thread: takes calls in order, each for its service time, with faults on demand.
#ifndef ATTND_TESTS_UNIT_ATTNLOAD_FAKE_BACKEND_H_
#define ATTND_TESTS_UNIT_ATTNLOAD_FAKE_BACKEND_H_

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "client/attnload/backend.h"

namespace attnd::attnload {

class FakeBackend final : public Backend {
 public:
  explicit FakeBackend(Nanos service_time);
  ~FakeBackend() override;

  // The server does nothing from `from` on, for so long.
  void StallAt(TimePoint from, Nanos how_long);
  std::atomic<int> reject_every{0};   // the n-th step is rejected; 0: none
  std::atomic<int> corrupt_every{0};  // the n-th step's answer has one wrong element; 0: none

  void Create(int64_t session, const client::SessionConfig& config, Done<std::string> done) override;
  void Step(int64_t session, const client::StepRequest& request, bool unary, std::stop_token cancel,
            Done<client::StepResult> done) override;
  void Close(int64_t session, const std::string& session_id, Done<bool> done) override;

  int64_t open_sessions();
  int64_t bad_positions();  // steps that were neither an append nor a replay
  int64_t streamed();       // steps that were not asked to be unary

 private:
  void Enqueue(std::function<void()> serve);
  void Serve();
  absl::StatusOr<client::StepResult> Answer(const client::StepRequest& request, const std::stop_token& cancel);

  const Nanos service_time_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  TimePoint stall_from_, stall_until_;
  std::deque<std::function<void()>> queue_;
  std::map<std::string, client::SessionConfig> sessions_;
  std::map<std::pair<std::string, int>, int64_t> lengths_;
  int64_t steps_ = 0, bad_positions_ = 0, streamed_ = 0;
  std::thread thread_;
};

}  // namespace attnd::attnload

#endif  // ATTND_TESTS_UNIT_ATTNLOAD_FAKE_BACKEND_H_

// A stand-in for attnd in the tests of its clients: real gRPC on a loopback port, sessions in memory, attention by
// the plain formula, and faults on demand. Only what the clients use of the contract, and one thread per call.
#ifndef ATTND_TESTS_UNIT_CLIENT_FAKE_SERVER_H_
#define ATTND_TESTS_UNIT_CLIENT_FAKE_SERVER_H_

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace attnd {

// A failure as attnd reports it.
struct FakeError {
  absl::StatusCode code = absl::StatusCode::kUnavailable;
  std::string reason;
  std::string message;
  std::optional<absl::Duration> retry_delay;
};

struct FakeFaults {
  std::atomic<int> fail_calls{0};    // so many calls are answered with `error` and not carried out
  std::atomic<int> lose_answers{0};  // so many Steps are carried out and then answered with `error`
  FakeError error;
  std::atomic<int> delay_ms{0};       // before each Step
  std::atomic<int> corrupt_steps{0};  // the n-th Step from now has one wrong element; 0: none
  std::string token;                  // calls without this bearer token are UNAUTHENTICATED
};

class FakeServer {
 public:
  FakeServer();  // on a port of its own
  ~FakeServer();

  std::string target() const;
  int port() const;
  FakeFaults& faults();
  int calls() const;  // that arrived, of any method
  int step_calls() const;

  void Stop();     // connections break, sessions are forgotten
  void Restart();  // on the same port

 private:
  class Service;
  void Start(int port);
  struct Running;

  std::unique_ptr<FakeFaults> faults_;
  std::unique_ptr<Running> running_;
  int port_ = 0;
  int calls_ = 0, step_calls_ = 0;  // of servers that were stopped
};

}  // namespace attnd

#endif  // ATTND_TESTS_UNIT_CLIENT_FAKE_SERVER_H_

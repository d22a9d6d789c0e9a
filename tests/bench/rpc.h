// What mode `rpc` is made of: the two processes that it measures, and the bare calls of the echo.
//
// The roof of a step is a bare gRPC echo: a request of a Step's bytes, answered at once with an answer's bytes, raw at
// both ends, from another process over the same loopback.
#ifndef ATTND_TESTS_BENCH_RPC_H_
#define ATTND_TESTS_BENCH_RPC_H_

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace attnd::bench {

// A child process that says "... serving on HOST:PORT" on its standard output. Ended by the destructor, and by the
// kernel when this process dies.
class ServingProcess {
 public:
  // Runs `program` with `arguments`; empty on failure, after saying why.
  static std::unique_ptr<ServingProcess> Spawn(const std::string& program, const std::vector<std::string>& arguments);
  // Runs the echo in a copy of this process. REQUIRES: gRPC was not used yet: its threads do not survive a fork.
  static std::unique_ptr<ServingProcess> ForkEcho(size_t answer_bytes);
  ~ServingProcess();

  const std::string& address() const { return address_; }
  pid_t pid() const { return pid_; }

 private:
  ServingProcess(pid_t pid, int output) : pid_(pid), output_(output) {}
  bool ReadAddress();

  pid_t pid_;
  int output_;
  std::string address_;
};

// Runs f in a copy of this process; returns whether it returned true there.
bool RunInChild(const std::function<bool()>& f);

// Answers every Step and every message of a StepStream with `answer_bytes` bytes until the process is ended. Prints
// its address as attnd does.
[[noreturn]] void ServeEcho(size_t answer_bytes, int output);

// Bare calls of Step and StepStream, of the echo and of attnd alike: serialized bytes in and out, nothing looked at.
class RawCalls {
 public:
  RawCalls(const std::string& address, const std::string& request);
  ~RawCalls();
  void Unary();
  void Stream();  // one message there and back on a stream that stays open
  std::string LastAnswer() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_RPC_H_

// attnd: serves attnd.v1.Attention until SIGTERM or SIGINT, then drains. See --help, or server/flags.cc.
#include <malloc.h>
#include <signal.h>

#include <atomic>
#include <cstring>
#include <iostream>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/acceptor.h"
#include "server/flags.h"
#include "server/log.h"
#include "server/metrics.h"
#include "server/server.h"
#include "server/service_manager.h"
#include "server/version.h"

namespace attnd {
namespace {

// Keeps what the allocator holds close to what is in use, because what it holds counts against the memory limit. By
// default glibc raises the size from which blocks are mappings of their own, given back when freed, to 32 MiB as soon
// as large ones are freed; messages of megabytes, and the pieces that they arrive in, then leave holes in an arena for
// each of 8 threads a CPU: with --max_inflight_bytes=128MiB 580 MiB were held beside the cache under overload. So it is
// 270 MiB; with a size of 128 KiB, which the pieces are below, 330 MiB.
void LimitAllocator() {
  mallopt(M_MMAP_THRESHOLD, 64 << 10);
  mallopt(M_TRIM_THRESHOLD, 1 << 20);
  mallopt(M_ARENA_MAX, 2);
}

// Blocked before any thread exists, so that all threads leave them to WaitForSignal.
sigset_t BlockSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error of the write, not the end
  return signals;
}

int Fail(const std::string& message) {
  Log(LogLevel::kError, "attnd cannot start", {{"reason", message}});
  return 1;
}

// A manager that does not listen is its own trouble: the server serves all the same.
void TellServiceManager(absl::string_view state) {
  const absl::Status told = NotifyServiceManager(state);
  if (!told.ok()) {
    Log(LogLevel::kWarning, "the service manager was not told", {{"reason", std::string(told.message())}});
  }
}

// Drains and saves, and hurries if another signal comes meanwhile. False: sessions that were to be saved are lost.
bool DrainOnSignal(const sigset_t& signals, Server* server) {
  int signal_number = 0;
  sigwait(&signals, &signal_number);
  TellServiceManager("STOPPING=1\nSTATUS=draining");
  Log(LogLevel::kInfo, "draining",
      {{"signal", strsignal(signal_number)}, {"timeout", absl::FormatDuration(server->options().drain_timeout)}});
  std::atomic<bool> drained{false};
  std::thread hurrier([&] {
    const timespec period = {.tv_sec = 0, .tv_nsec = 50'000'000};
    while (!drained.load()) {
      if (sigtimedwait(&signals, nullptr, &period) > 0) server->Hurry();
    }
  });
  const bool complete = server->Drain();
  Log(complete ? LogLevel::kInfo : LogLevel::kWarning,
      complete ? "drained: every call was answered" : "drained: calls were cut off by the timeout or a second signal");
  const bool saved = server->SaveSessions();
  drained.store(true);
  hurrier.join();
  return saved;
}

int Serve(const Options& options, const sigset_t& signals) {
  auto server = Server::Start(options);
  if (!server.ok()) return Fail(std::string(server.status().message()));
  const std::string metrics_address = (*server)->metrics_address();
  std::cout << "attnd " << kVersion << " serving on " << (*server)->address()
            << (metrics_address.empty() ? ", no metrics"
                                        : absl::StrCat(", metrics on http://", metrics_address, "/metrics"))
            << std::endl;
  TellServiceManager(absl::StrCat("READY=1\nSTATUS=serving on ", (*server)->address()));
  return DrainOnSignal(signals, server->get()) ? 0 : 1;
}

int Main(int argc, char** argv) {
  LimitAllocator();  // before any thread exists: each takes an arena of its own
  // Debian builds Abseil with its detector of lock cycles on: at every Lock it keeps a graph, which costs microseconds
  // a step. Tests leave it on.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  const CommandLine command_line = ParseCommandLine(argc, argv);
  const sigset_t signals = BlockSignals();
  RaiseOpenFileLimit();
  switch (command_line.action) {
    case CommandLine::Action::kNothing:
      return 0;
    case CommandLine::Action::kPrintMetricsReference:
      std::cout << Metrics(BuildInfo{}).Reference();
      return 0;
    case CommandLine::Action::kPrintConfig: {
      const absl::StatusOr<Options> options = ResolveOptions(command_line.options);
      if (!options.ok()) return Fail(std::string(options.status().message()));
      PrintConfig(*options, std::cout);
      return 0;
    }
    case CommandLine::Action::kServe:
      break;
  }
  return Serve(command_line.options, signals);
}

}  // namespace
}  // namespace attnd

int main(int argc, char** argv) { return attnd::Main(argc, argv); }

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "tests/bench/rpc.h"

namespace attnd::bench {
namespace {

struct Pipe {
  int read_end = -1;
  int write_end = -1;
};

bool Open(Pipe* pipe_ends) {
  std::array<int, 2> ends;
  if (pipe(ends.data()) != 0) {
    std::fprintf(stderr, "attnd_bench: pipe: %s\n", std::strerror(errno));
    return false;
  }
  *pipe_ends = {ends[0], ends[1]};
  return true;
}

// In the child: nothing of it outlives the parent.
void BecomeChild(const Pipe& output) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  close(output.read_end);
}

}  // namespace

std::unique_ptr<ServingProcess> ServingProcess::Spawn(const std::string& program,
                                                      const std::vector<std::string>& arguments) {
  Pipe output;
  if (!Open(&output)) return nullptr;
  std::vector<char*> argv = {const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t pid = fork();
  if (pid == 0) {
    BecomeChild(output);
    dup2(output.write_end, STDOUT_FILENO);
    close(output.write_end);
    execv(program.c_str(), argv.data());
    std::fprintf(stderr, "attnd_bench: %s: %s\n", program.c_str(), std::strerror(errno));
    _exit(127);
  }
  close(output.write_end);
  std::unique_ptr<ServingProcess> process(new ServingProcess(pid, output.read_end));
  return process->ReadAddress() ? std::move(process) : nullptr;
}

std::unique_ptr<ServingProcess> ServingProcess::ForkEcho(size_t answer_bytes) {
  Pipe output;
  if (!Open(&output)) return nullptr;
  const pid_t pid = fork();
  if (pid == 0) {
    BecomeChild(output);
    ServeEcho(answer_bytes, output.write_end);
  }
  close(output.write_end);
  std::unique_ptr<ServingProcess> process(new ServingProcess(pid, output.read_end));
  return process->ReadAddress() ? std::move(process) : nullptr;
}

bool ServingProcess::ReadAddress() {
  constexpr char kBefore[] = "serving on ";
  std::string line;
  char c = 0;
  while (read(output_, &c, 1) == 1 && c != '\n') line += c;
  const size_t found = line.find(kBefore);
  if (c != '\n' || found == std::string::npos) {
    std::fprintf(stderr, "attnd_bench: the server did not start: '%s'\n", line.c_str());
    return false;
  }
  const std::string rest = line.substr(found + std::strlen(kBefore));
  address_ = rest.substr(0, rest.find_first_of(", "));
  return true;
}

ServingProcess::~ServingProcess() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  close(output_);
}

bool RunInChild(const std::function<bool()>& f) {
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const bool ok = f();
    std::fflush(stdout);
    _exit(ok ? 0 : 1);
  }
  int status = 1;
  return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace attnd::bench

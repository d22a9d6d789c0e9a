#include "tests/service/program.h"

#include <fcntl.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "tests/service/harness.h"
#include "tests/service/http_get.h"

namespace attnd::testing {
namespace {

std::string ReadAll(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string Between(const std::string& text, const std::string& before, const std::string& after) {
  const size_t begin = text.find(before);
  if (begin == std::string::npos) return "";
  const size_t start = begin + before.size();
  return text.substr(start, text.find(after, start) - start);
}

// Field `number` (from 3) of /proc/PID/stat, as proc(5) counts them.
double StatField(pid_t pid, size_t number) {
  const std::string line = ReadAll(absl::StrCat("/proc/", pid, "/stat"));
  const std::vector<std::string> fields = absl::StrSplit(line.substr(line.rfind(')') + 1), ' ', absl::SkipEmpty());
  double value = -1;
  EXPECT_TRUE(number - 3 < fields.size() && absl::SimpleAtod(fields[number - 3], &value)) << line;
  return value;
}

}  // namespace

Program::Program(const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
                 int open_files) {
  static std::atomic<int> number{0};
  const std::string base = absl::StrCat(::testing::TempDir(), "/attnd_", getpid(), "_", ++number);
  out_path_ = base + ".out";
  err_path_ = base + ".err";
  std::vector<char*> argv = {const_cast<char*>("attnd")};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ != 0) return;
  dup2(open(out_path_.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600), STDOUT_FILENO);
  dup2(open(err_path_.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600), STDERR_FILENO);
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that is killed leaves no server behind
  close_range(3, ~0u, 0);            // what this process holds is none of the program's
  if (open_files > 0) {
    const rlimit files{static_cast<rlim_t>(open_files), static_cast<rlim_t>(open_files)};
    setrlimit(RLIMIT_NOFILE, &files);
  }
  for (const std::string& variable : environment) putenv(const_cast<char*>(variable.c_str()));
  execv(ATTND_PROGRAM, argv.data());
  _exit(127);
}

Program::~Program() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  unlink(out_path_.c_str());
  unlink(err_path_.c_str());
}

std::unique_ptr<Program> Program::Serving(const std::vector<std::string>& arguments, int open_files) {
  std::vector<std::string> all = {"--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0", "--kv_cache_bytes=64MiB"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  auto program = std::make_unique<Program>(all, std::vector<std::string>(), open_files);
  EXPECT_TRUE(program->AwaitStart()) << program->err();
  return program;
}

std::string Program::out() const { return ReadAll(out_path_); }
std::string Program::err() const { return ReadAll(err_path_); }
void Program::Signal(int signal_number) { kill(pid_, signal_number); }

int Program::Wait() {
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

bool Program::AwaitStart() {
  if (!Eventually([&] { return absl::StrContains(out(), "\n"); }, absl::Seconds(30))) return false;
  const std::string line = out();
  address = Between(line, "serving on ", ",");
  metrics_address = Between(line, "http://", "/metrics");
  return !address.empty();
}

std::shared_ptr<grpc::Channel> Program::NewChannel() const {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

std::map<std::string, double> Program::Metrics() const {
  std::map<std::string, double> values;
  const std::string text = HttpGet(metrics_address, "/metrics");
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const size_t space = line.rfind(' ');
    double value = 0;
    if (line.front() == '#' || space == absl::string_view::npos) continue;
    if (absl::SimpleAtod(absl::StripTrailingAsciiWhitespace(line.substr(space + 1)), &value)) {
      values[std::string(line.substr(0, space))] = value;
    }
  }
  return values;
}

int64_t Program::ResidentBytes() const { return static_cast<int64_t>(StatField(pid_, 24)) * sysconf(_SC_PAGESIZE); }
double Program::CpuSeconds() const {
  return (StatField(pid_, 14) + StatField(pid_, 15)) / static_cast<double>(sysconf(_SC_CLK_TCK));
}
int Program::Threads() const { return static_cast<int>(StatField(pid_, 20)); }

int Program::OpenFiles() const {
  int count = 0;
  for (const auto& file : std::filesystem::directory_iterator(absl::StrCat("/proc/", pid_, "/fd"))) {
    (void)file;
    ++count;
  }
  return count;
}

}  // namespace attnd::testing

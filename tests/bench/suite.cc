// Suite: the commands whose rows are the README's table, one after the other.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/bench/modes.h"

namespace attnd::bench {
namespace {

using Command = std::vector<std::string>;  // a mode, then its arguments

const std::vector<Command>& Commands() {
  static const std::vector<Command> kCommands = {
      // from memory, and the shapes that users of long contexts have
      {"decode", "--kv=f32,bf16,f16,int8", "--tokens=4096,32768", "--threads=1,max"},
      {"decode", "--kv=f32,bf16", "--tokens=128,1024,131072"},
      // group sizes 1, 7, 8
      {"decode", "--kv=f32,bf16,f16,int8", "--shape=gpt2,qwen2-7b,llama3-70b"},
      {"decode", "--kv=f32,bf16,f16,int8", "--batch=8,64", "--tokens=1024"},
      {"decode", "--kv=f32,bf16,f16,int8", "--tokens=1024", "--resident=cache"},
      {"decode", "--kv=f32,bf16,f16,int8", "--queries=2,4,8"},
      {"fork", "--kv=f32,bf16,f16,int8", "--batch=4"},
      {"prefill", "--kv=f32,bf16,f16,int8", "--tokens=128,512,2048"},
      {"prefill", "--kv=f32,bf16,f16,int8", "--tokens=512", "--history=32768"},
      {"append", "--kv=f32,bf16,f16,int8"},
      {"scaling", "--kv=f32,bf16", "--of=decode,prefill", "--tokens=4096"},
      {"sessions", "--tokens=4096,32768"},
      {"storage"},
#ifdef ATTND_BENCH_RPC
      {"rpc", "--tokens=33,128"},
      {"serve", "--tokens=1024,4096"},
#endif
  };
  return kCommands;
}

// Each in a process of its own: rpc and serve fork, and threads that another mode has started would be missing then.
int RunAsProcess(const Command& command) {
  std::vector<char*> arguments = {const_cast<char*>("attnd_bench")};
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  std::fflush(stdout);
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    execv("/proc/self/exe", arguments.data());
    std::fprintf(stderr, "attnd_bench: %s cannot be started: %s\n", arguments[1], std::strerror(errno));
    _exit(1);
  }
  int status = 1;
  if (pid < 0 || waitpid(pid, &status, 0) != pid) return 1;
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  std::fprintf(stderr, "attnd_bench: %s was ended by signal %d\n", arguments[1], WTERMSIG(status));
  return 1;
}

}  // namespace

int RunSuite(const Options& options) {
  int worst = 0;
  for (const Command& command : Commands()) {
    std::string text = "attnd_bench";
    for (const std::string& word : command) text += " " + word;
    if (options.list) {
      std::printf("%s\n", text.c_str());
      continue;
    }
    if (!options.json) std::printf("\n# %s\n", text.c_str());
    Command whole = command;
    whole.push_back("--seconds=" + std::to_string(options.seconds));
    if (options.json) whole.emplace_back("--json");
    worst = std::max(worst, RunAsProcess(whole));
  }
  return worst;
}

}  // namespace attnd::bench

#include "server/engine/cpu_limit.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <limits>
#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace attnd {
namespace {

std::optional<std::string> ReadFile(const std::string& path) {
  std::ifstream in(path);
  if (!in) return std::nullopt;
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::optional<int64_t> ReadNumber(const std::string& path) {
  const std::optional<std::string> text = ReadFile(path);
  int64_t value = 0;
  if (!text || !absl::SimpleAtoi(*text, &value)) return std::nullopt;  // "max" is no number
  return value;
}

// This process's group of a controller; an empty controller is v2's one hierarchy.
std::optional<std::string> GroupPath(const std::string& root, absl::string_view controller) {
  const std::optional<std::string> text = ReadFile(root + "/proc/self/cgroup");
  if (!text) return std::nullopt;
  for (const absl::string_view line : absl::StrSplit(*text, '\n')) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (fields.size() != 3) continue;
    for (const absl::string_view name : absl::StrSplit(fields[1], ',')) {
      if (name == controller) return std::string(fields[2]);
    }
  }
  return std::nullopt;
}

// Calls `visit` with the folder of the process's group and of each of its parents. Inside a container the mounted tree
// starts at the container's own group, whose path is that of the host: then only the mount's top is there to be read.
void ForEachGroup(const std::string& root, absl::string_view controller,
                  const std::function<void(const std::string&)>& visit) {
  const std::string mount = root + "/sys/fs/cgroup" + (controller.empty() ? "" : absl::StrCat("/", controller));
  std::string path = GroupPath(root, controller).value_or("/");
  while (!path.empty() && path != "/") {
    visit(mount + path);
    path.resize(path.rfind('/'));
  }
  visit(mount);
}

int64_t AffinityCpus() {
  // Machines beyond 1024 CPUs need a larger mask than cpu_set_t.
  for (int bits = 1024; bits <= 1 << 20; bits *= 2) {
    cpu_set_t* const mask = CPU_ALLOC(bits);
    const size_t bytes = CPU_ALLOC_SIZE(bits);
    const bool ok = sched_getaffinity(0, bytes, mask) == 0;
    const int count = ok ? CPU_COUNT_S(bytes, mask) : 0;
    CPU_FREE(mask);
    if (ok) return count;
  }
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

int CpuLimit(const std::string& root) {
  int64_t cpus = AffinityCpus();
  const auto apply = [&cpus](int64_t quota, int64_t period) {
    if (quota > 0 && period > 0) cpus = std::min(cpus, quota / period);
  };
  ForEachGroup(root, "", [&](const std::string& group) {
    const std::string text = ReadFile(group + "/cpu.max").value_or("");
    const std::vector<absl::string_view> fields = absl::StrSplit(text, ' ');
    int64_t quota = 0, period = 0;
    if (fields.size() == 2 && absl::SimpleAtoi(fields[0], &quota) && absl::SimpleAtoi(fields[1], &period)) {
      apply(quota, period);
    }
  });
  ForEachGroup(root, "cpu", [&](const std::string& group) {
    apply(ReadNumber(group + "/cpu.cfs_quota_us").value_or(-1), ReadNumber(group + "/cpu.cfs_period_us").value_or(0));
  });
  return static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(cpus, std::numeric_limits<int>::max())));
}

int64_t MemoryLimit(const std::string& root) {
  int64_t bytes = std::numeric_limits<int64_t>::max();
  const std::string meminfo = ReadFile(root + "/proc/meminfo").value_or("");
  for (absl::string_view line : absl::StrSplit(meminfo, '\n')) {
    int64_t kib = 0;
    if (absl::ConsumePrefix(&line, "MemTotal:") && absl::SimpleAtoi(absl::StripSuffix(line, "kB"), &kib)) {
      bytes = kib * 1024;
    }
  }
  const auto apply = [&bytes](std::optional<int64_t> limit) {
    if (limit && *limit > 0) bytes = std::min(bytes, *limit);
  };
  ForEachGroup(root, "", [&](const std::string& group) { apply(ReadNumber(group + "/memory.max")); });
  ForEachGroup(root, "memory", [&](const std::string& group) { apply(ReadNumber(group + "/memory.limit_in_bytes")); });
  return bytes == std::numeric_limits<int64_t>::max() ? 0 : bytes;
}

}  // namespace attnd

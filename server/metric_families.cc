#include "server/metric_families.h"

#include <dirent.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "server/engine/cpu_limit.h"

namespace attnd {
namespace {

using prometheus::MetricFamily;
using prometheus::MetricType;

void Append(std::vector<MetricFamily>* families, std::string name, std::string help, MetricType type, double value) {
  MetricFamily family;
  family.name = std::move(name);
  family.help = std::move(help);
  family.type = type;
  family.metric.resize(1);
  if (type == MetricType::Counter) {
    family.metric[0].counter.value = value;
  } else {
    family.metric[0].gauge.value = value;
  }
  families->push_back(std::move(family));
}

void AppendGauge(std::vector<MetricFamily>* families, std::string name, std::string help, int64_t value) {
  Append(families, std::move(name), std::move(help), MetricType::Gauge, static_cast<double>(value));
}

// Fields 3 and on of /proc/self/stat; the second one may itself hold spaces and ends at the last parenthesis.
std::vector<std::string> ProcessStat() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return {};
  return absl::StrSplit(line.substr(name_end + 1), ' ', absl::SkipEmpty());
}

double StatField(const std::vector<std::string>& fields, size_t number) {
  double value = 0;
  if (number - 3 < fields.size() && absl::SimpleAtod(fields[number - 3], &value)) return value;
  return 0;
}

double BootTimeSeconds() {
  std::ifstream file("/proc/stat");
  std::string word;
  double value = 0;
  while (file >> word) {
    if (word == "btime" && file >> value) return value;
  }
  return 0;
}

int OpenFileDescriptors() {
  DIR* directory = opendir("/proc/self/fd");
  if (directory == nullptr) return 0;
  int count = 0;
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count - 3;  // ".", ".." and the one that reads
}

}  // namespace

void AppendEngineFamilies(const EngineStats& stats, std::vector<MetricFamily>* families) {
  const auto gauge = [families](std::string name, std::string help, int64_t value) {
    AppendGauge(families, std::move(name), std::move(help), value);
  };
  gauge("attnd_sessions_active", "Open sessions.", stats.sessions_active);
  gauge("attnd_sessions_spilled",
        "Open sessions that are on disk: moved there, or of an earlier process and not asked for yet.",
        stats.sessions_spilled);
  gauge("attnd_sessions_limit", "Most sessions that may be open at a time.", stats.sessions_limit);
  gauge("attnd_queue_depth", "Requests that wait for compute.", stats.queue_depth);
  gauge("attnd_queue_limit", "Most requests that may wait for compute.", stats.queue_limit);
  gauge("attnd_queue_tokens", "Tokens of requests that wait for compute.", stats.queue_tokens);
  gauge("attnd_queue_tokens_limit", "Most tokens that may wait for compute.", stats.queue_tokens_limit);
  gauge("attnd_kv_cache_capacity_bytes", "Size of the key/value cache.", stats.capacity_bytes);
  gauge("attnd_kv_cache_reserved_bytes", "Cache memory promised to sessions, used or not.", stats.reserved_bytes);
  gauge("attnd_kv_cache_used_bytes", "Cache memory in blocks that hold tokens, whole blocks counted.",
        stats.used_bytes);
  gauge("attnd_kv_cache_shared_bytes", "Cache memory in blocks that more than one session holds, counted once.",
        stats.shared_bytes);
  gauge("attnd_kv_cache_spilled_bytes", "Bytes of the files of open sessions that are on disk.", stats.spilled_bytes);
  gauge("attnd_kv_cache_tokens", "Tokens held, those of each session's longest layer.", stats.cache_tokens);
}

void AppendEvictionFamilies(bool evicts, const std::string& spill_dir, std::vector<MetricFamily>* families) {
  AppendGauge(families, "attnd_kv_cache_eviction_enabled",
              "1 where idle sessions make room when the cache is full (--eviction=lru).", evicts ? 1 : 0);
  struct statvfs disk{};
  if (spill_dir.empty() || statvfs(spill_dir.c_str(), &disk) != 0) disk = {};
  AppendGauge(families, "attnd_spill_disk_available_bytes", "Free bytes of the file system of --spill_dir.",
              static_cast<int64_t>(disk.f_bavail * disk.f_frsize));
  AppendGauge(families, "attnd_spill_disk_size_bytes", "Size of the file system of --spill_dir; 0: none.",
              static_cast<int64_t>(disk.f_blocks * disk.f_frsize));
}

void AppendEdgeFamilies(const EdgeStats& stats, std::vector<MetricFamily>* families) {
  AppendGauge(families, "attnd_streams_limit", "Most StepStream calls that may be open at a time.",
              stats.streams_limit);
  AppendGauge(families, "attnd_inflight_bytes", "Bytes of requests and of their answers, until these are written.",
              stats.inflight_bytes);
  AppendGauge(families, "attnd_inflight_bytes_limit", "Most bytes of requests and answers that may be held at a time.",
              stats.inflight_bytes_limit);
}

void AppendProcessFamilies(std::vector<MetricFamily>* families) {
  const std::vector<std::string> stat = ProcessStat();
  const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  const double page_bytes = static_cast<double>(sysconf(_SC_PAGESIZE));
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  static const double boot_time = BootTimeSeconds();
  // The limit of a container is a file that its start wrote.
  static const double memory_limit = static_cast<double>(MemoryLimit());
  Append(families, "attnd_memory_limit_bytes", "Memory limit of the container or machine.", MetricType::Gauge,
         memory_limit);
  // Field numbers of proc(5).
  Append(families, "process_cpu_seconds_total", "User and system CPU time spent.", MetricType::Counter,
         (StatField(stat, 14) + StatField(stat, 15)) / ticks);
  Append(families, "process_start_time_seconds", "Start time of the process since the Unix epoch.", MetricType::Gauge,
         boot_time + StatField(stat, 22) / ticks);
  Append(families, "process_threads", "Threads of the process.", MetricType::Gauge, StatField(stat, 20));
  Append(families, "process_virtual_memory_bytes", "Virtual memory size.", MetricType::Gauge, StatField(stat, 23));
  Append(families, "process_resident_memory_bytes", "Resident memory size.", MetricType::Gauge,
         StatField(stat, 24) * page_bytes);
  Append(families, "process_open_fds", "Open file descriptors.", MetricType::Gauge, OpenFileDescriptors());
  Append(families, "process_max_fds", "Most file descriptors that may be open.", MetricType::Gauge,
         static_cast<double>(files.rlim_cur));
}

}  // namespace attnd

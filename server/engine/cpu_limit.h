// What this process may use of the machine: CPUs and memory, as its control group (v1 or v2), its affinity and the
// machine allow. A container of 2 CPUs on a machine of 64 must not start 64 threads.
#ifndef ATTND_SERVER_ENGINE_CPU_LIMIT_H_
#define ATTND_SERVER_ENGINE_CPU_LIMIT_H_

#include <cstdint>
#include <string>

namespace attnd {

// Whole CPUs, at least 1: the lesser of the affinity mask and of every quota from this process's group up (rounded
// down: a thread more than the quota pays for is throttled in the middle of a step). `root` is prefixed to
// /proc and /sys paths: tests give a folder of their own.
int CpuLimit(const std::string& root = "");

// Bytes: the lesser of the machine's memory and of every limit from this process's group up. 0 when nothing is known.
int64_t MemoryLimit(const std::string& root = "");

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_CPU_LIMIT_H_

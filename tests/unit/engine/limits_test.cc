// CPU and memory limits, read from a made-up /proc and /sys.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "server/engine/cpu_limit.h"

namespace attnd {
namespace {

class Limits : public testing::Test {
 protected:
  Limits() : root_(testing::TempDir() + "/attnd_limits_" + std::to_string(getpid())) {
    std::filesystem::remove_all(root_);
    Write("/proc/meminfo", "MemTotal:       16000000 kB\nMemFree: 1 kB\n");
  }
  ~Limits() override { std::filesystem::remove_all(root_); }
  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  const std::string root_;
};

TEST_F(Limits, WithoutGroupsTheMachineIsTheLimit) {
  EXPECT_GE(CpuLimit(root_), 1);
  EXPECT_EQ(MemoryLimit(root_), int64_t{16000000} * 1024);
  EXPECT_EQ(CpuLimit(), CpuLimit(root_) < CpuLimit() ? CpuLimit(root_) : CpuLimit());
  EXPECT_GT(MemoryLimit(), 0);
}

TEST_F(Limits, Version2TakesTheLeastOfAllParents) {
  Write("/proc/self/cgroup", "0::/a/b\n");
  Write("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  Write("/sys/fs/cgroup/a/cpu.max", "100000 100000\n");
  Write("/sys/fs/cgroup/a/b/memory.max", "max\n");
  Write("/sys/fs/cgroup/a/memory.max", "1000000000\n");
  EXPECT_EQ(CpuLimit(root_), 1);
  EXPECT_EQ(MemoryLimit(root_), 1000000000);
}

TEST_F(Limits, InsideAContainerTheMountsTopIsTheGroup) {
  Write("/proc/self/cgroup", "0::/\n");
  Write("/sys/fs/cgroup/cpu.max", "150000 100000\n");
  Write("/sys/fs/cgroup/memory.max", "2000000000\n");
  EXPECT_EQ(CpuLimit(root_), 1);  // 1.5, rounded down
  EXPECT_EQ(MemoryLimit(root_), 2000000000);
}

TEST_F(Limits, LessThanOneCpuIsOneThread) {
  Write("/proc/self/cgroup", "0::/\n");
  Write("/sys/fs/cgroup/cpu.max", "20000 100000\n");
  EXPECT_EQ(CpuLimit(root_), 1);
}

TEST_F(Limits, Version1) {
  Write("/proc/self/cgroup", "5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n");
  Write("/sys/fs/cgroup/cpu/docker/x/cpu.cfs_quota_us", "100000\n");
  Write("/sys/fs/cgroup/cpu/docker/x/cpu.cfs_period_us", "100000\n");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  Write("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  Write("/sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "3000000000\n");
  Write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(CpuLimit(root_), 1);
  EXPECT_EQ(MemoryLimit(root_), 3000000000);
}

}  // namespace
}  // namespace attnd

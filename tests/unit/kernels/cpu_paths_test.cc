#include "kernels/cpu_paths.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace attnd {
namespace {

TEST(CpuPathsTest, SelfTestPasses) {
  std::string what;
  EXPECT_TRUE(SelfTest(&what)) << what;
  EXPECT_EQ(what, "");
}

TEST(CpuPathsTest, NamesSayWhatIsUsed) {
  EXPECT_FALSE(IsaName().empty());
  EXPECT_EQ(OneDnnVersion().find("3."), 0u) << OneDnnVersion();
  EXPECT_NE(KernelPath(KvDType::kF32).find("streaming"), std::string::npos) << KernelPath(KvDType::kF32);
  RecordProperty("isa", IsaName());
  RecordProperty("f32", KernelPath(KvDType::kF32));
  RecordProperty("bf16", KernelPath(KvDType::kBf16));
}

// One variable decides oneDNN's paths and ours: under SSE41 there is neither a ukernel nor an AVX target.
TEST(CpuPathsTest, MaxIsaIsObeyed) {
  const char* max = std::getenv("ONEDNN_MAX_CPU_ISA");
  if (max == nullptr) GTEST_SKIP() << "ONEDNN_MAX_CPU_ISA is not set";
  const std::string paths = KernelPath(KvDType::kF32) + KernelPath(KvDType::kBf16);
  if (std::string(max) == "SSE41") {
    EXPECT_EQ(paths.find("brgemm"), std::string::npos) << paths;
    EXPECT_EQ(paths.find("AVX"), std::string::npos) << paths;
  } else if (std::string(max) == "AVX2") {
    EXPECT_EQ(paths.find("AVX3"), std::string::npos) << paths;
    EXPECT_EQ(paths.find("avx512"), std::string::npos) << paths;
  } else if (std::string(max).find("AVX512_CORE") == 0 && std::string(max).find("AMX") == std::string::npos) {
    EXPECT_EQ(paths.find("amx"), std::string::npos) << paths;
  }
}

}  // namespace
}  // namespace attnd

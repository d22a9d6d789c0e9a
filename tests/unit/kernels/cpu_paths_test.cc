#include "kernels/cpu_paths.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

namespace attnd {
namespace {

constexpr KvDType kKvDTypes[] = {KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8};

TEST(CpuPathsTest, SelfTestPasses) {
  std::string what;
  EXPECT_TRUE(SelfTest(&what)) << what;
  EXPECT_EQ(what, "");
}

TEST(CpuPathsTest, NamesSayWhatIsUsed) {
  EXPECT_FALSE(IsaName().empty());
  EXPECT_EQ(OneDnnVersion().find("3."), 0u) << OneDnnVersion();
  RecordProperty("isa", IsaName());
  for (const KvDType dtype : kKvDTypes) {
    EXPECT_NE(KernelPath(dtype).find("streaming"), std::string::npos) << KernelPath(dtype);
    RecordProperty(std::string("path") + std::to_string(static_cast<int>(dtype)), KernelPath(dtype));
  }
}

// One variable decides oneDNN's paths and ours: under SSE41 there is neither a ukernel nor an AVX target.
TEST(CpuPathsTest, MaxIsaIsObeyed) {
  const char* max = std::getenv("ONEDNN_MAX_CPU_ISA");
  if (max == nullptr) GTEST_SKIP() << "ONEDNN_MAX_CPU_ISA is not set";
  std::string paths;
  for (const KvDType dtype : kKvDTypes) paths += KernelPath(dtype) + "; ";
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

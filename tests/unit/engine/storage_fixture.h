// Engines that move sessions to disk, in a directory of the test's own.
#ifndef ATTND_TESTS_UNIT_ENGINE_STORAGE_FIXTURE_H_
#define ATTND_TESTS_UNIT_ENGINE_STORAGE_FIXTURE_H_

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>

#include "tests/unit/engine/engine_harness.h"

namespace attnd {

namespace fs = std::filesystem;

// Bytes of one block of the tiny shape: 64 tokens of K and V, one float each.
inline constexpr int64_t kTinyBlock = 512;

class StorageFixture : public ::testing::Test {
 protected:
  StorageFixture() {
    std::string name = (fs::temp_directory_path() / "attnd_storage_XXXXXX").string();
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  ~StorageFixture() override { fs::remove_all(directory_); }

  EngineOptions SpillOptions(int64_t blocks) {
    EngineOptions options = Harness::DefaultOptions();
    options.kv_cache_bytes = blocks * kTinyBlock;
    options.evict_lru = true;
    options.spill_dir = (directory_ / "spill").string();
    return options;
  }
  fs::path File(const std::string& id) { return directory_ / "spill" / (id + ".attnd"); }
  int Files(const fs::path& directory) {
    int count = 0;
    for (const auto& entry : fs::directory_iterator(directory)) count += entry.path().extension() == ".attnd" ? 1 : 0;
    return count;
  }
  // Steps of other sessions until this one is on disk.
  void Push(Harness* h, const std::string& id) {
    for (int i = 0; i < 1000 && h->engine->GetSession(id)->spilled_bytes == 0; i++) {
      const std::string other = h->Create();
      ASSERT_TRUE(h->Mean(other, {1}).status.ok());
    }
    ASSERT_GT(h->engine->GetSession(id)->spilled_bytes, 0);
  }

  fs::path directory_;
};

}  // namespace attnd

#endif  // ATTND_TESTS_UNIT_ENGINE_STORAGE_FIXTURE_H_

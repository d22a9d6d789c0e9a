// What the tests of SnapshotStore share: a temporary directory, and child processes that may be spoilt.
#ifndef ATTND_TESTS_UNIT_CACHE_SNAPSHOT_STORE_HARNESS_H_
#define ATTND_TESTS_UNIT_CACHE_SNAPSHOT_STORE_HARNESS_H_

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "server/cache/snapshot_store.h"
#include "tests/unit/cache/snapshot_harness.h"

namespace attnd {

inline constexpr char kName[] = "0123456789abcdef0123456789abcdef";
inline constexpr char kOther[] = "ffffffffffffffffffffffffffffffff";
inline constexpr KvShape kShape = {64, 64, KvDType::kF32};

class SnapshotStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "snapshot_store_XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    base_ = pattern;
    directory_ = base_ + "/snapshots";
  }
  void TearDown() override { std::filesystem::remove_all(base_); }

  static std::unique_ptr<SnapshotStore> Open(const std::string& directory, bool sync = false) {
    auto store = SnapshotStore::Open(directory, {sync});
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }

  static absl::StatusOr<int64_t> Write(SnapshotStore* store, const std::string& name, const TestSession& session) {
    SnapshotWriter writer(session.cache, session.layout, {session.Layout(), name});
    return store->Write(name, &writer);
  }

  static std::string ReadAll(SnapshotStore::File* file) {
    std::string all, piece;
    do {
      EXPECT_TRUE(file->Next(&piece).ok());
      all += piece;
    } while (!piece.empty());
    return all;
  }

  static std::string ReadAll(const SnapshotStore& store, const std::string& name) {
    auto file = store.Read(name);
    EXPECT_TRUE(file.ok()) << file.status();
    return file.ok() ? ReadAll(file->get()) : "";
  }

  static void MakeFile(const std::string& path, const std::string& contents = "x") {
    std::ofstream(path, std::ios::binary) << contents;
  }

  // What lies in the directory beside the lock.
  static std::vector<std::string> Files(const std::string& directory) {
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) {
      if (entry.path().filename() != ".lock") files.push_back(entry.path().filename());
    }
    return files;
  }

  static std::vector<std::string> Names(const SnapshotStore& store) {
    std::vector<std::string> names;
    auto entries = store.List();
    EXPECT_TRUE(entries.ok()) << entries.status();
    if (entries.ok()) {
      for (const SnapshotStore::Entry& entry : *entries) names.push_back(entry.name);
    }
    return names;
  }

  std::string base_, directory_;
};

// Runs it in a child process, with what it may do to that process. True when it succeeded.
inline bool InChild(const std::function<bool()>& body) {
  std::cout.flush();
  const pid_t child = fork();
  if (child == 0) {
    const bool good = body();
    std::cout.flush();
    _exit(good ? 0 : 1);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace attnd

#endif  // ATTND_TESTS_UNIT_CACHE_SNAPSHOT_STORE_HARNESS_H_

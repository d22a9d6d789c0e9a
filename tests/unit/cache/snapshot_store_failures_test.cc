// Full disks, killed processes, other file systems: each made for real, in a child process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/cache/snapshot_store.h"
#include "tests/unit/cache/snapshot_harness.h"
#include "tests/unit/cache/snapshot_store_harness.h"

namespace attnd {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

using SnapshotStoreFailures = SnapshotStoreTest;

TEST_F(SnapshotStoreFailures, RemovesWhatAKilledProcessWasWriting) {
  auto session = MakeSession({kShape, 4, {20000}, {}}, 1);
  const std::string unfinished = absl::StrCat(directory_, "/", kName, ".tmp");
  for (int round = 0; round < 10; round++) {
    const pid_t child = fork();
    if (child == 0) {
      auto store = SnapshotStore::Open(directory_, {true});
      while (store.ok()) Write(store->get(), kName, *session).IgnoreError();
      _exit(1);
    }
    int status = 0;
    while (!fs::exists(unfinished)) ASSERT_EQ(waitpid(child, &status, WNOHANG), 0) << "it ended by itself";
    usleep(round * 300);
    ASSERT_EQ(kill(child, SIGKILL), 0);
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));

    auto store = Open(directory_);
    ASSERT_NE(store, nullptr);
    EXPECT_FALSE(fs::exists(unfinished));
    for (const std::string& name : Names(*store)) {
      EXPECT_TRUE(ReadAll(*store, name) == session->Snapshot(name)) << "round " << round;
      EXPECT_TRUE(store->Remove(name).ok());
    }
    EXPECT_THAT(Files(directory_), IsEmpty());
  }
}

// A file system of 1 MiB in a mount namespace of the child's own: it is gone with the child, whatever happens.
bool MountSmallDisk(const std::string& path) {
  fs::create_directory(path);
  return unshare(CLONE_NEWNS) == 0 && mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("tmpfs", path.c_str(), "tmpfs", 0, "size=1m") == 0;
}

// In a child process, where a failed expectation must become an exit status.
#define CHECK_IN_CHILD(condition, what)                                               \
  if (!(condition)) {                                                                 \
    std::cout << __FILE__ << ":" << __LINE__ << ": " #condition ": " << what << "\n"; \
    return false;                                                                     \
  }

// Nothing of `large` fits, and that changes nothing for what was there and what comes.
bool RefusesWhatDoesNotFit(SnapshotStore* store, const std::string& directory, absl::StatusCode code,
                           const std::string& sentence, const TestSession& small, const TestSession& large) {
  const auto write = [&](const std::string& name, const TestSession& session) {
    SnapshotWriter writer(session.cache, session.layout, {session.Layout(), name});
    return store->Write(name, &writer).status();
  };
  const auto contents = [&](const std::string& name) {
    std::string piece;
    auto file = store->Read(name);
    return file.ok() && (*file)->Next(&piece).ok() ? piece : "";
  };
  const absl::Status wrote = write(kName, small);
  CHECK_IN_CHILD(wrote.ok(), wrote);
  for (const char* const name : {kOther, kName}) {
    const absl::Status status = write(name, large);
    CHECK_IN_CHILD(status.code() == code, status);
    CHECK_IN_CHILD(absl::StrContains(status.message(), sentence), status);
    CHECK_IN_CHILD(absl::StrContains(status.message(), absl::StrCat(directory, "/", name, ".tmp")), status);
    const auto files = std::distance(fs::directory_iterator(directory), fs::directory_iterator());
    CHECK_IN_CHILD(files == 2, files << " files: more than the lock and the small one");
    CHECK_IN_CHILD(contents(kName) == small.Snapshot(kName), name);
  }
  const absl::Status again = write(kOther, small);
  CHECK_IN_CHILD(again.ok(), again);
  CHECK_IN_CHILD(contents(kOther) == small.Snapshot(kOther), "the one after the failures");
  return true;
}

TEST_F(SnapshotStoreFailures, LeavesNothingOnAFullDisk) {
  auto small = MakeSession({kShape, 1, {100}, {}}, 1), large = MakeSession({kShape, 1, {3000}, {}}, 2);
  const std::string disk = base_ + "/disk";
  if (InChild([&] { return !MountSmallDisk(disk); })) GTEST_SKIP() << "needs the right to mount";
  for (const bool sync : {false, true}) {
    EXPECT_TRUE(InChild([&] {
      if (!MountSmallDisk(disk)) return false;
      auto store = SnapshotStore::Open(disk, {sync});
      CHECK_IN_CHILD(store.ok(), store.status());
      return RefusesWhatDoesNotFit(store->get(), disk, absl::StatusCode::kResourceExhausted, "No space left on device",
                                   *small, *large);
    }));
  }
}

TEST_F(SnapshotStoreFailures, LeavesNothingOfAFileThatMayNotGrow) {
  auto small = MakeSession({kShape, 1, {100}, {}}, 1), large = MakeSession({kShape, 1, {3000}, {}}, 2);
  EXPECT_TRUE(InChild([&] {
    auto store = SnapshotStore::Open(directory_, {});
    CHECK_IN_CHILD(store.ok(), store.status());
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {1 << 20, 1 << 20};
    CHECK_IN_CHILD(setrlimit(RLIMIT_FSIZE, &limit) == 0, "setrlimit");
    return RefusesWhatDoesNotFit(store->get(), directory_, absl::ErrnoToStatusCode(EFBIG), "File too large", *small,
                                 *large);
  }));
}

TEST_F(SnapshotStoreFailures, CopiesWhatComesFromAnotherFileSystem) {
  auto small = MakeSession({kShape, 1, {100}, {}}, 1), large = MakeSession({kShape, 1, {3000}, {}}, 2);
  const std::string disk = base_ + "/disk";
  if (InChild([&] { return !MountSmallDisk(disk); })) GTEST_SKIP() << "needs the right to mount";
  EXPECT_TRUE(InChild([&] {
    if (!MountSmallDisk(disk)) return false;
    auto here = SnapshotStore::Open(directory_, {}), there = SnapshotStore::Open(disk, {});
    CHECK_IN_CHILD(here.ok() && there.ok(), here.status() << there.status());
    CHECK_IN_CHILD(Write(here->get(), kName, *small).ok() && Write(here->get(), kOther, *large).ok(), "write");
    const absl::Status adopted = (*there)->Adopt(here->get(), kName);
    CHECK_IN_CHILD(adopted.ok(), adopted);
    CHECK_IN_CHILD(ReadAll(**there, kName) == small->Snapshot(kName), "the copy");
    // There is no room for this one: it stays where it is.
    const absl::Status refused = (*there)->Adopt(here->get(), kOther);
    CHECK_IN_CHILD(absl::StrContains(refused.message(), "No space left on device"), refused);
    CHECK_IN_CHILD(ReadAll(**here, kOther) == large->Snapshot(kOther), "the original");
    CHECK_IN_CHILD(Names(**here) == std::vector<std::string>{kOther}, "what is left");
    CHECK_IN_CHILD(Names(**there) == std::vector<std::string>{kName}, "what has come");
    CHECK_IN_CHILD(Files(disk).size() == 1, "nothing unfinished");
    return true;
  }));
}

TEST_F(SnapshotStoreFailures, SaysWhyItCannotWrite) {
  auto store = Open(directory_);
  // A directory in the way; of a user without rights root would make a bad test.
  fs::create_directories(absl::StrCat(directory_, "/", kName, ".attnd/full"));
  auto session = MakeSession({kShape, 1, {3}, {}}, 1);
  const absl::Status status = Write(store.get(), kName, *session).status();
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr("Is a directory"), HasSubstr(absl::StrCat(directory_, "/", kName, ".attnd"))));
  EXPECT_THAT(Files(directory_), ElementsAre(absl::StrCat(kName, ".attnd")));
}

}  // namespace
}  // namespace attnd

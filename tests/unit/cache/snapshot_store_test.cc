#include "server/cache/snapshot_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/unit/cache/snapshot_harness.h"
#include "tests/unit/cache/snapshot_store_harness.h"

namespace attnd {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

int Mode(const std::string& path) {
  struct stat info;
  EXPECT_EQ(stat(path.c_str(), &info), 0) << path;
  return info.st_mode & 07777;
}

TEST_F(SnapshotStoreTest, KeepsWhatWasWritten) {
  auto session = MakeSession({kShape, 2, {1000, 64}, {}}, 1), empty = MakeSession({kShape, 2, {0, 0}, {}}, 1);
  for (const bool sync : {false, true}) {
    auto store = Open(directory_, sync);
    const absl::StatusOr<int64_t> bytes = Write(store.get(), kName, *session);
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    ASSERT_TRUE(Write(store.get(), kOther, *empty).ok());
    const auto entries = store->List();
    ASSERT_TRUE(entries.ok());
    ASSERT_EQ(entries->size(), 2u);
    EXPECT_EQ((*entries)[0].name, kName);
    EXPECT_EQ((*entries)[0].bytes, *bytes);
    EXPECT_EQ((*entries)[1].name, kOther);

    const std::string read = ReadAll(*store, kName);
    EXPECT_EQ(read, session->Snapshot(kName));
    EXPECT_EQ(static_cast<int64_t>(read.size()), *bytes);
    EXPECT_EQ(ReadAll(*store, kOther), empty->Snapshot(kOther));
    const Restored restored = Restore(read, kMaxPieceBytes);
    ASSERT_TRUE(restored.status.ok()) << restored.status;
    ExpectEqualSessions(session.get(), restored.session.get());

    EXPECT_TRUE(store->Remove(kName).ok());
    EXPECT_THAT(Names(*store), ElementsAre(kOther));
    EXPECT_TRUE(store->Remove(kOther).ok());
    EXPECT_THAT(Files(directory_), IsEmpty());
  }
}

TEST_F(SnapshotStoreTest, WritesInPlaceOfAnOlderOne) {
  auto store = Open(directory_);
  auto older = MakeSession({kShape, 1, {100}, {}}, 1), newer = MakeSession({kShape, 1, {10}, {}}, 2);
  ASSERT_TRUE(Write(store.get(), kName, *older).ok());
  ASSERT_TRUE(Write(store.get(), kName, *newer).ok());
  EXPECT_EQ(ReadAll(*store, kName), newer->Snapshot(kName));
  EXPECT_THAT(Files(directory_), ElementsAre(absl::StrCat(kName, ".attnd")));
}

TEST_F(SnapshotStoreTest, IsForItsOwnerOnly) {
  const mode_t before = umask(0);
  auto store = Open(directory_);
  ASSERT_TRUE(Write(store.get(), kName, *MakeSession({kShape, 1, {3}, {}}, 1)).ok());
  umask(before);
  EXPECT_EQ(Mode(directory_), 0700);
  EXPECT_EQ(Mode(absl::StrCat(directory_, "/", kName, ".attnd")), 0600);
  EXPECT_EQ(Mode(directory_ + "/.lock"), 0600);
}

TEST_F(SnapshotStoreTest, IsUsedByOneProcessAtATime) {
  auto store = Open(directory_);
  const auto second = SnapshotStore::Open(directory_, {});
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()),
              testing::AllOf(HasSubstr(directory_), HasSubstr(absl::StrCat("process ", getpid()))));
  EXPECT_TRUE(InChild([&] { return !SnapshotStore::Open(directory_, {}).ok(); }));
  store.reset();
  EXPECT_TRUE(InChild([&] { return SnapshotStore::Open(directory_, {}).ok(); }));
  EXPECT_TRUE(SnapshotStore::Open(directory_, {}).ok());
}

TEST_F(SnapshotStoreTest, NamesTheDirectoryThatItCannotUse) {
  const auto missing = SnapshotStore::Open(base_ + "/no/such", {});
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()),
              testing::AllOf(HasSubstr(base_ + "/no/such"), HasSubstr("No such file or directory")));
  MakeFile(base_ + "/file");
  EXPECT_THAT(std::string(SnapshotStore::Open(base_ + "/file", {}).status().message()), HasSubstr("Not a directory"));
}

TEST_F(SnapshotStoreTest, LeavesOtherFilesAlone) {
  fs::create_directory(directory_);
  std::vector<std::string> others = {
      "notes.tmp",
      "notes.attnd",
      absl::StrCat(std::string(kName).substr(1), ".attnd"),  // 31 digits
      absl::StrCat(kName, "0.attnd"),
      absl::StrCat(std::string(31, '0'), "g.attnd"),
      absl::StrCat(std::string(31, '0'), "A.attnd"),
      absl::StrCat(std::string(31, '0'), "g.tmp"),
      kName,
      absl::StrCat(kName, ".attnd.tmp"),
      ".attnd",
  };
  for (const std::string& other : others) MakeFile(absl::StrCat(directory_, "/", other));
  // Of the right name, but no files.
  fs::create_directory(absl::StrCat(directory_, "/", std::string(32, '1'), ".attnd"));
  fs::create_symlink("notes.tmp", absl::StrCat(directory_, "/", std::string(32, '2'), ".attnd"));
  ASSERT_EQ(mkfifo(absl::StrCat(directory_, "/", std::string(32, '3'), ".attnd").c_str(), 0600), 0);
  for (const char digit : {'1', '2', '3'}) others.push_back(absl::StrCat(std::string(32, digit), ".attnd"));

  auto store = Open(directory_);
  ASSERT_NE(store, nullptr);
  EXPECT_THAT(Names(*store), IsEmpty());
  for (const char digit : {'1', '2', '3'}) EXPECT_FALSE(store->Read(std::string(32, digit)).ok()) << digit;
  EXPECT_THAT(Files(directory_), testing::UnorderedElementsAreArray(others));
}

TEST_F(SnapshotStoreTest, RefusesWhatIsNoName) {
  auto store = Open(directory_);
  for (const std::string& name : {std::string(), std::string("../../etc/passwd"), std::string(31, '0'),
                                  std::string(33, '0'), std::string(32, 'G'), std::string(32, '/')}) {
    EXPECT_EQ(store->Read(name).status().code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(store->Remove(name).code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(Write(store.get(), name, *MakeSession({kShape, 1, {3}, {}}, 1)).status().code(),
              absl::StatusCode::kInvalidArgument)
        << name;
    EXPECT_EQ(store->Adopt(store.get(), name).code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_THAT(Files(directory_), IsEmpty());
}

TEST_F(SnapshotStoreTest, SaysWhichFileIsMissing) {
  auto store = Open(directory_), other = Open(base_ + "/other");
  const std::string path = absl::StrCat(directory_, "/", kName, ".attnd");
  for (const absl::Status& status :
       {store->Read(kName).status(), store->Remove(kName), other->Adopt(store.get(), kName)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(std::string(status.message()), testing::AllOf(HasSubstr(path), HasSubstr("No such file or directory")));
  }
}

TEST_F(SnapshotStoreTest, ReadsOnWhenTheFileIsRemovedOrReplaced) {
  auto session = MakeSession({kShape, 2, {5000}, {}}, 1), newer = MakeSession({kShape, 1, {1}, {}}, 2);
  for (const bool replaced : {false, true}) {
    auto store = Open(directory_);
    ASSERT_TRUE(Write(store.get(), kName, *session).ok());
    auto file = store->Read(kName);
    ASSERT_TRUE(file.ok());
    std::string first;
    ASSERT_TRUE((*file)->Next(&first).ok());
    ASSERT_EQ(first.size(), kMaxPieceBytes);
    if (replaced) {
      ASSERT_TRUE(Write(store.get(), kName, *newer).ok());
    } else {
      ASSERT_TRUE(store->Remove(kName).ok());
    }
    EXPECT_TRUE(first + ReadAll(file->get()) == session->Snapshot(kName));
  }
}

// The reader sees a file that was cut or that has grown.
TEST_F(SnapshotStoreTest, ReadsDamagedFilesAsTheyAre) {
  auto store = Open(directory_);
  auto session = MakeSession({kShape, 1, {100}, {}}, 1);
  const std::string whole = session->Snapshot(kName), path = absl::StrCat(directory_, "/", kName, ".attnd");
  for (const std::string& contents : {std::string(), whole.substr(0, whole.size() - 1), whole + "x"}) {
    MakeFile(path, contents);
    const std::string read = ReadAll(*store, kName);
    EXPECT_EQ(read, contents);
    EXPECT_FALSE(Restore(read, kMaxPieceBytes).status.ok());
  }
}

TEST_F(SnapshotStoreTest, AdoptsFromAnotherDirectory) {
  auto session = MakeSession({kShape, 1, {100}, {}}, 1);
  for (const bool sync : {false, true}) {
    auto from = Open(directory_, sync), to = Open(base_ + "/other", sync);
    ASSERT_TRUE(Write(from.get(), kName, *session).ok());
    ASSERT_TRUE(to->Adopt(from.get(), kName).ok());
    EXPECT_THAT(Names(*from), IsEmpty());
    EXPECT_EQ(ReadAll(*to, kName), session->Snapshot(kName));
  }
}

}  // namespace
}  // namespace attnd

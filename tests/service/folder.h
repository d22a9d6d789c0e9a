// A folder of a test's own, gone with the test; and a disk of 1 MiB.
#ifndef ATTND_TESTS_SERVICE_FOLDER_H_
#define ATTND_TESTS_SERVICE_FOLDER_H_

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace attnd::testing {

class Folder {
 public:
  Folder() : path_((std::filesystem::temp_directory_path() / "attnd_service_XXXXXX").string()) {
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
  }
  ~Folder() {
    if (!disk_.empty()) umount2(disk_.c_str(), MNT_DETACH);
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

  // A file system of 1 MiB that only this thread and its children see: gone with them, whatever happens. "": this needs
  // the right to mount.
  std::string SmallDisk() {
    const std::string path = *this / "disk";
    std::filesystem::create_directory(path);
    if (unshare(CLONE_NEWNS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", path.c_str(), "tmpfs", 0, "size=1m") != 0) {
      return "";
    }
    return disk_ = path;
  }

 private:
  std::string path_, disk_;
};

// The snapshots in a directory.
inline int CountSnapshots(const std::string& directory) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    count += entry.path().extension() == ".attnd" ? 1 : 0;
  }
  return count;
}

inline void FlipBit(const std::string& path, int64_t from_end) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  ASSERT_TRUE(file.is_open()) << path;
  file.seekg(-from_end, std::ios::end);
  const char byte = static_cast<char>(file.get());
  file.seekp(-from_end, std::ios::end);
  file.put(static_cast<char>(byte ^ 0x10));
}

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVICE_FOLDER_H_

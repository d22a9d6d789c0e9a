// A directory for one run, in memory where the machine has such a file system.
#ifndef ATTND_TESTS_UNIT_ENGINE_MODEL_SCRATCH_H_
#define ATTND_TESTS_UNIT_ENGINE_MODEL_SCRATCH_H_

#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <string>

namespace attnd {

class ScratchDirectory {
 public:
  ScratchDirectory() {
    path_ =
        (access("/dev/shm", W_OK) == 0 ? std::string("/dev/shm") : std::filesystem::temp_directory_path().string()) +
        "/attnd_model_XXXXXX";
    if (mkdtemp(path_.data()) == nullptr) {
      std::perror(path_.c_str());
      std::abort();
    }
  }
  ~ScratchDirectory() { std::filesystem::remove_all(path_); }
  ScratchDirectory(const ScratchDirectory&) = delete;
  ScratchDirectory& operator=(const ScratchDirectory&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace attnd

#endif  // ATTND_TESTS_UNIT_ENGINE_MODEL_SCRATCH_H_

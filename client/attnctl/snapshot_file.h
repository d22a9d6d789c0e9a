// A file that is written whole or not at all: to NAME.tmp, which takes NAME's place once everything is on the disk. A
// crash in between leaves NAME as it was. "-" is standard output, which is as good as its reader.
#ifndef ATTND_CLIENT_ATTNCTL_SNAPSHOT_FILE_H_
#define ATTND_CLIENT_ATTNCTL_SNAPSHOT_FILE_H_

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attnd::attnctl {

// Errors name the file and say what the system says. Not thread-safe.
class SnapshotFile {
 public:
  // Readable by its owner alone: it holds a conversation. FAILED_PRECONDITION: another process writes it, or what has
  // the name is no plain file; or standard output is a terminal.
  static absl::StatusOr<std::unique_ptr<SnapshotFile>> Create(const std::string& name);
  ~SnapshotFile();  // without Commit nothing is left
  SnapshotFile(const SnapshotFile&) = delete;
  SnapshotFile& operator=(const SnapshotFile&) = delete;

  absl::Status Write(std::string_view bytes);
  // The last call. After an error nothing is left, but that the name may stand for the new content already when only
  // the folder's own write failed.
  absl::Status Commit();

 private:
  SnapshotFile(std::string name, std::string temporary, int fd)
      : name_(std::move(name)), temporary_(std::move(temporary)), fd_(fd) {}

  const std::string name_;
  std::string temporary_;  // empty: there is none, or none any more
  int fd_;
};

// The bytes of a file, or of standard input for "-", in pieces; "" at the end.
class SnapshotInput {
 public:
  // NOT_FOUND, or what the system says.
  static absl::StatusOr<std::unique_ptr<SnapshotInput>> Open(const std::string& name);
  ~SnapshotInput();
  SnapshotInput(const SnapshotInput&) = delete;
  SnapshotInput& operator=(const SnapshotInput&) = delete;

  absl::StatusOr<std::string> Next();
  int64_t total_bytes() const { return total_bytes_; }  // 0: not known

 private:
  SnapshotInput(std::string name, int fd, int64_t total_bytes)
      : name_(std::move(name)), fd_(fd), total_bytes_(total_bytes) {}

  const std::string name_;
  const int fd_;
  const int64_t total_bytes_;
};

}  // namespace attnd::attnctl

#endif  // ATTND_CLIENT_ATTNCTL_SNAPSHOT_FILE_H_

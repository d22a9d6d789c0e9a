#include "client/attnctl/snapshot_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace attnd::attnctl {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;

absl::Status SystemError(absl::string_view what, const std::string& name) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot ", what, " '", name, "'"));
}

// Opens and locks the temporary file, which a killed process may have left behind. -1: errno says why.
absl::StatusOr<int> OpenTemporary(const std::string& path) {
  for (;;) {
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) return SystemError("create", path);
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
      const bool held = errno == EWOULDBLOCK;
      const absl::Status error =
          held ? absl::FailedPreconditionError(absl::StrCat("'", path, "' is being written by another process"))
               : SystemError("lock", path);
      close(fd);
      return error;
    }
    // Whoever held the lock before may have given the file its final name meanwhile.
    struct stat mine, named;
    if (fstat(fd, &mine) == 0 && stat(path.c_str(), &named) == 0 && mine.st_ino == named.st_ino &&
        mine.st_dev == named.st_dev) {
      if (ftruncate(fd, 0) == 0 && fchmod(fd, 0600) == 0) return fd;
      const absl::Status error = SystemError("empty", path);
      close(fd);
      return error;
    }
    close(fd);
  }
}

absl::Status SyncFolderOf(const std::string& name) {
  const std::string parent = std::filesystem::path(name).parent_path().string();
  const std::string folder = parent.empty() ? "." : parent;
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return SystemError("open", folder);
  // Some file systems have nothing to sync there and say EINVAL.
  const bool synced = fsync(fd) == 0 || errno == EINVAL;
  const absl::Status status = synced ? absl::OkStatus() : SystemError("sync", folder);
  close(fd);
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SnapshotFile>> SnapshotFile::Create(const std::string& name) {
  if (name == "-") {
    if (isatty(STDOUT_FILENO) == 1) {
      return absl::FailedPreconditionError("standard output is a terminal, and a snapshot is nothing to read");
    }
    return std::unique_ptr<SnapshotFile>(new SnapshotFile("standard output", "", STDOUT_FILENO));
  }
  struct stat there;
  if (stat(name.c_str(), &there) == 0 && !S_ISREG(there.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat("'", name, "' is no plain file"));
  }
  std::string temporary = name + ".tmp";
  const absl::StatusOr<int> fd = OpenTemporary(temporary);
  if (!fd.ok()) return fd.status();
  return std::unique_ptr<SnapshotFile>(new SnapshotFile(name, std::move(temporary), *fd));
}

SnapshotFile::~SnapshotFile() {
  if (!temporary_.empty()) unlink(temporary_.c_str());
  if (fd_ >= 0 && fd_ != STDOUT_FILENO) close(fd_);
}

absl::Status SnapshotFile::Write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return SystemError("write", name_);
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status SnapshotFile::Commit() {
  if (fd_ == STDOUT_FILENO) return absl::OkStatus();
  if (fsync(fd_) != 0) return SystemError("sync", temporary_);
  if (rename(temporary_.c_str(), name_.c_str()) != 0) return SystemError("rename the snapshot to", name_);
  temporary_.clear();
  return SyncFolderOf(name_);
}

absl::StatusOr<std::unique_ptr<SnapshotInput>> SnapshotInput::Open(const std::string& name) {
  if (name == "-") return std::unique_ptr<SnapshotInput>(new SnapshotInput("standard input", STDIN_FILENO, 0));
  const int fd = open(name.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return SystemError("open", name);
  struct stat file;
  const bool plain = fstat(fd, &file) == 0 && S_ISREG(file.st_mode);
  return std::unique_ptr<SnapshotInput>(new SnapshotInput(name, fd, plain ? file.st_size : 0));
}

SnapshotInput::~SnapshotInput() {
  if (fd_ != STDIN_FILENO) close(fd_);
}

absl::StatusOr<std::string> SnapshotInput::Next() {
  std::string bytes(kPieceBytes, '\0');
  for (;;) {
    const ssize_t count = read(fd_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return SystemError("read", name_);
    bytes.resize(static_cast<size_t>(count));
    return bytes;
  }
}

}  // namespace attnd::attnctl

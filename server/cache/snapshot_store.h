// A directory of snapshots, one file `<name>.attnd` per session; a name is 32 hex digits. What is being written has the
// name `<name>.tmp` and takes its place by a rename: a file that is there is whole, whenever the process was killed.
//
// One process at a time uses a directory: it holds a lock on its file `.lock`. Files are for their owner only (0600),
// and so is the directory (0700) when it is made here. What has other names is left alone.
//
// Errors carry errno's sentence and the path, under the code that absl::ErrnoToStatusCode gives: NOT_FOUND where there
// is no such file, RESOURCE_EXHAUSTED when the disk is full, INVALID_ARGUMENT for what is no name.
//
// Thread-safe, but for calls that change the same name at once. Calls block on the disk.
#ifndef ATTND_SERVER_CACHE_SNAPSHOT_STORE_H_
#define ATTND_SERVER_CACHE_SNAPSHOT_STORE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/cache/snapshot.h"

namespace attnd {

// Owns a file descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.Release()) {}
  UniqueFd& operator=(UniqueFd&&) = delete;
  ~UniqueFd();
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release();

 private:
  int fd_ = -1;
};

class SnapshotStore {
 public:
  using FailIo = std::function<int(const char* call)>;
  struct Options {
    // Whether Write, Remove and Adopt return only when the disk has it: what a machine's crash must not undo.
    bool sync = false;
    // Tests: asked before each system call that may fail (open, read, write, flush, close, rename, unlink); other than
    // 0: it is not made and fails with this errno.
    FailIo fail_io = nullptr;
  };
  struct Entry {
    std::string name;
    int64_t bytes = 0;
  };

  // A snapshot that is being read; the file may be removed or replaced meanwhile.
  class File {
   public:
    int64_t bytes() const { return bytes_; }
    // The next bytes, at most kMaxPieceBytes; "" at the end. Reuse the string: its memory is.
    absl::Status Next(std::string* piece);

   private:
    friend class SnapshotStore;
    File(UniqueFd fd, int64_t bytes, std::string path, FailIo fail_io)
        : fd_(std::move(fd)), bytes_(bytes), path_(std::move(path)), fail_io_(std::move(fail_io)) {}

    const UniqueFd fd_;
    const int64_t bytes_;
    const std::string path_;
    const FailIo fail_io_;
    int64_t read_ = 0;
  };

  // Makes the directory when it is not there (its parent must be), takes its lock and removes what a killed process was
  // writing. FAILED_PRECONDITION when another process has the lock; the message names it.
  static absl::StatusOr<std::unique_ptr<SnapshotStore>> Open(std::string directory, Options options);

  SnapshotStore(const SnapshotStore&) = delete;
  SnapshotStore& operator=(const SnapshotStore&) = delete;

  const std::string& directory() const { return directory_; }

  // The snapshots that are there, by name.
  absl::StatusOr<std::vector<Entry>> List() const;
  // Writes all of the snapshot, in place of one of that name. Returns its bytes. After an error nothing is left of it.
  // CANCELLED when `stop`, asked before each piece, says so, and ABORTED when `still_wanted`, asked once after all is
  // written and before the file gets its name, says no.
  absl::StatusOr<int64_t> Write(
      absl::string_view name, SnapshotWriter* snapshot, absl::FunctionRef<bool()> stop = [] { return false; },
      absl::FunctionRef<bool()> still_wanted = [] { return true; });
  absl::StatusOr<std::unique_ptr<File>> Read(absl::string_view name) const;
  absl::Status Remove(absl::string_view name);
  // Moves a snapshot of another directory here, in place of one of that name. Where that is another file system it is
  // copied, and is on the disk before it is removed there. After an error it is there still.
  absl::Status Adopt(SnapshotStore* from, absl::string_view name);

 private:
  SnapshotStore(std::string directory, Options options, UniqueFd fd, UniqueFd lock);

  std::string Path(absl::string_view file) const;
  int Unlink(const std::string& file) const;  // as unlink(2)
  absl::Status RemoveUnfinished() const;
  using Fill = absl::FunctionRef<absl::Status(int fd, const std::string& path)>;
  absl::StatusOr<std::vector<std::string>> FileNames() const;
  // Makes NAME.tmp, has `fill` write it and gives it its name.
  absl::Status WriteFile(absl::string_view name, bool sync, Fill fill);
  absl::Status Finish(absl::string_view name, bool sync, UniqueFd fd);
  absl::Status SyncDirectory() const;

  const std::string directory_;
  const Options options_;
  const UniqueFd fd_;    // of the directory
  const UniqueFd lock_;  // of its lock file
};

}  // namespace attnd

#endif  // ATTND_SERVER_CACHE_SNAPSHOT_STORE_H_

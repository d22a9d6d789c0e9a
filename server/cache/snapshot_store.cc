#include "server/cache/snapshot_store.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace attnd {
namespace {

constexpr absl::string_view kSuffix = ".attnd";
constexpr absl::string_view kUnfinishedSuffix = ".tmp";
constexpr char kLockFile[] = ".lock";
constexpr size_t kNameDigits = 32;

bool IsName(absl::string_view name) {
  return name.size() == kNameDigits &&
         std::all_of(name.begin(), name.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

absl::Status CheckName(absl::string_view name) {
  if (IsName(name)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("'", name, "' is no name of a snapshot: 32 hexadecimal digits"));
}

std::string FileOf(absl::string_view name) { return absl::StrCat(name, kSuffix); }
std::string UnfinishedOf(absl::string_view name) { return absl::StrCat(name, kUnfinishedSuffix); }

// To be called before anything else changes errno.
absl::Status ErrnoError(absl::string_view failed, absl::string_view path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot ", failed, " ", path));
}

template <class Call>
auto Retry(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// What `call` returns, or what it would when the tests' hook wants it to fail. Not for calls that must not be repeated.
template <class Call>
auto Try(const SnapshotStore::FailIo& fail, const char* name, const Call& call) {
  if (fail) {
    errno = fail(name);
    if (errno != 0) return decltype(call()){-1};
  }
  return Retry(call);
}

absl::Status WriteAll(const SnapshotStore::FailIo& fail, int fd, absl::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t written = Try(fail, "write", [&] { return write(fd, bytes.data(), bytes.size()); });
    if (written < 0) return ErrnoError("write", path);
    bytes.remove_prefix(written);
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> Lock(int directory, const std::string& path) {
  UniqueFd lock(openat(directory, kLockFile, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid()) return ErrnoError("open", absl::StrCat(path, "/", kLockFile));
  char text[32] = {};
  if (Retry([&] { return flock(lock.get(), LOCK_EX | LOCK_NB); }) != 0) {
    if (errno != EWOULDBLOCK) return ErrnoError("lock", absl::StrCat(path, "/", kLockFile));
    long pid = 0;
    const bool known = pread(lock.get(), text, sizeof(text) - 1, 0) > 0 && std::sscanf(text, "%ld", &pid) == 1;
    return absl::FailedPreconditionError(
        absl::StrCat("the directory ", path, " is in use by ", known ? absl::StrCat("process ", pid) : "another one"));
  }
  // For that message alone, so it does not matter when a full disk has no room for it.
  const int size = std::snprintf(text, sizeof(text), "%ld\n", static_cast<long>(getpid()));
  if (ftruncate(lock.get(), 0) == 0 && pwrite(lock.get(), text, size, 0) < 0) errno = 0;
  return lock;
}

}  // namespace

UniqueFd::~UniqueFd() {
  if (valid()) close(fd_);
}

int UniqueFd::Release() { return std::exchange(fd_, -1); }

absl::Status SnapshotStore::File::Next(std::string* piece) {
  piece->resize(std::min(static_cast<int64_t>(kMaxPieceBytes), bytes_ - read_));
  size_t filled = 0;
  while (filled < piece->size()) {
    const ssize_t bytes =
        Try(fail_io_, "read", [&] { return read(fd_.get(), piece->data() + filled, piece->size() - filled); });
    if (bytes < 0) return ErrnoError("read", path_);
    if (bytes == 0) break;  // cut meanwhile: its reader will see
    filled += bytes;
  }
  piece->resize(filled);
  read_ += static_cast<int64_t>(filled);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<SnapshotStore>> SnapshotStore::Open(std::string directory, Options options) {
  if (mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) return ErrnoError("make the directory", directory);
  UniqueFd fd(open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoError("open the directory", directory);
  absl::StatusOr<UniqueFd> lock = Lock(fd.get(), directory);
  if (!lock.ok()) return lock.status();
  std::unique_ptr<SnapshotStore> store(
      new SnapshotStore(std::move(directory), options, std::move(fd), *std::move(lock)));
  if (absl::Status status = store->RemoveUnfinished(); !status.ok()) return status;
  return store;
}

SnapshotStore::SnapshotStore(std::string directory, Options options, UniqueFd fd, UniqueFd lock)
    : directory_(std::move(directory)), options_(options), fd_(std::move(fd)), lock_(std::move(lock)) {}

int SnapshotStore::Unlink(const std::string& file) const {
  return Try(options_.fail_io, "unlink", [&] { return unlinkat(fd_.get(), file.c_str(), 0); });
}

std::string SnapshotStore::Path(absl::string_view file) const { return absl::StrCat(directory_, "/", file); }

absl::StatusOr<std::vector<std::string>> SnapshotStore::FileNames() const {
  // A descriptor of its own: closedir closes it, and the position in the directory is its.
  UniqueFd fd(openat(fd_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoError("open the directory", directory_);
  const std::unique_ptr<DIR, int (*)(DIR*)> files(fdopendir(fd.get()), closedir);
  if (files == nullptr) return ErrnoError("read the directory", directory_);
  fd.Release();
  std::vector<std::string> names;
  for (;;) {
    errno = 0;
    const dirent* const file = readdir(files.get());
    if (file == nullptr) break;
    names.push_back(file->d_name);
  }
  if (errno != 0) return ErrnoError("read the directory", directory_);
  std::sort(names.begin(), names.end());
  return names;
}

absl::Status SnapshotStore::RemoveUnfinished() const {
  const absl::StatusOr<std::vector<std::string>> names = FileNames();
  if (!names.ok()) return names.status();
  for (const std::string& file : *names) {
    absl::string_view name = file;
    // Of ours only: the directory may be one that others use, too.
    if (!absl::ConsumeSuffix(&name, kUnfinishedSuffix) || !IsName(name)) continue;
    if (unlinkat(fd_.get(), file.c_str(), 0) != 0 && errno != ENOENT) return ErrnoError("remove", Path(file));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<SnapshotStore::Entry>> SnapshotStore::List() const {
  const absl::StatusOr<std::vector<std::string>> names = FileNames();
  if (!names.ok()) return names.status();
  std::vector<Entry> entries;
  for (const std::string& file : *names) {
    absl::string_view name = file;
    if (!absl::ConsumeSuffix(&name, kSuffix) || !IsName(name)) continue;
    struct stat info;
    if (fstatat(fd_.get(), file.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno == ENOENT) continue;  // removed meanwhile
      return ErrnoError("look at", Path(file));
    }
    if (S_ISREG(info.st_mode)) entries.push_back({std::string(name), info.st_size});
  }
  return entries;
}

absl::Status SnapshotStore::SyncDirectory() const {
  if (Try(options_.fail_io, "flush", [&] { return fsync(fd_.get()); }) != 0)
    return ErrnoError("flush the directory", directory_);
  return absl::OkStatus();
}

absl::Status SnapshotStore::WriteFile(absl::string_view name, bool sync, Fill fill) {
  const std::string unfinished = UnfinishedOf(name), path = Path(unfinished);
  // What an earlier failure could not remove.
  if (Unlink(unfinished) != 0 && errno != ENOENT) return ErrnoError("remove", path);
  UniqueFd fd(Try(options_.fail_io, "open", [&] {
    return openat(fd_.get(), unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  }));
  if (!fd.valid()) return ErrnoError("make", path);
  absl::Status status = fill(fd.get(), path);
  if (status.ok()) status = Finish(name, sync, std::move(fd));
  if (!status.ok()) Unlink(unfinished);
  return status;
}

absl::Status SnapshotStore::Finish(absl::string_view name, bool sync, UniqueFd fd) {
  const std::string unfinished = UnfinishedOf(name), file = FileOf(name);
  if (sync && Try(options_.fail_io, "flush", [&] { return fdatasync(fd.get()); }) != 0)
    return ErrnoError("flush", Path(unfinished));
  // Network file systems may tell only now that there was no room.
  errno = options_.fail_io ? options_.fail_io("close") : 0;
  if (errno != 0 || (close(fd.Release()) != 0 && errno != EINTR)) return ErrnoError("close", Path(unfinished));
  const auto rename = [&] { return renameat(fd_.get(), unfinished.c_str(), fd_.get(), file.c_str()); };
  if (Try(options_.fail_io, "rename", rename) != 0) {
    return ErrnoError(absl::StrCat("rename ", Path(unfinished), " to"), Path(file));
  }
  if (!sync) return absl::OkStatus();
  absl::Status status = SyncDirectory();
  if (!status.ok()) Unlink(file);
  return status;
}

absl::StatusOr<int64_t> SnapshotStore::Write(absl::string_view name, SnapshotWriter* snapshot,
                                             absl::FunctionRef<bool()> stop, absl::FunctionRef<bool()> still_wanted) {
  absl::Status status = CheckName(name);
  if (!status.ok()) return status;
  status = WriteFile(name, options_.sync, [&](int fd, const std::string& path) {
    for (std::string piece; snapshot->Next(&piece);) {
      if (stop()) return absl::CancelledError(absl::StrCat("writing ", path, " was given up"));
      if (absl::Status written = WriteAll(options_.fail_io, fd, piece, path); !written.ok()) return written;
    }
    return still_wanted() ? absl::OkStatus() : absl::AbortedError(absl::StrCat(path, " is not wanted any more"));
  });
  if (!status.ok()) return status;
  return snapshot->total_bytes();
}

absl::StatusOr<std::unique_ptr<SnapshotStore::File>> SnapshotStore::Read(absl::string_view name) const {
  if (absl::Status status = CheckName(name); !status.ok()) return status;
  const std::string file = FileOf(name);
  std::string path = Path(file);
  // O_NONBLOCK: whoever opens a pipe would wait.
  UniqueFd fd(Try(options_.fail_io, "open",
                  [&] { return openat(fd_.get(), file.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK); }));
  if (!fd.valid()) return ErrnoError("open", path);
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoError("look at", path);
  if (!S_ISREG(info.st_mode)) return absl::FailedPreconditionError(absl::StrCat(path, " is no plain file"));
  // The kernel reads ahead by itself. Asked in pieces (POSIX_FADV_WILLNEED, 2 or 16 MiB) it took three times as long.
  posix_fadvise(fd.get(), 0, 0, POSIX_FADV_SEQUENTIAL);
  return std::unique_ptr<File>(new File(std::move(fd), info.st_size, std::move(path), options_.fail_io));
}

absl::Status SnapshotStore::Remove(absl::string_view name) {
  if (absl::Status status = CheckName(name); !status.ok()) return status;
  const std::string file = FileOf(name);
  if (Unlink(file) != 0) return ErrnoError("remove", Path(file));
  return options_.sync ? SyncDirectory() : absl::OkStatus();
}

absl::Status SnapshotStore::Adopt(SnapshotStore* from, absl::string_view name) {
  absl::Status status = CheckName(name);
  if (!status.ok()) return status;
  const std::string file = FileOf(name);
  if (options_.sync && !from->options_.sync) {  // it may be in the page cache alone
    const UniqueFd fd(openat(from->fd_.get(), file.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
    if (!fd.valid()) return ErrnoError("open", from->Path(file));
    if (fdatasync(fd.get()) != 0) return ErrnoError("flush", from->Path(file));
  }
  const auto rename = [&] { return renameat(from->fd_.get(), file.c_str(), fd_.get(), file.c_str()); };
  if (Try(options_.fail_io, "rename", rename) == 0) {
    if (!options_.sync) return absl::OkStatus();
    status = SyncDirectory();
    return status.ok() ? from->SyncDirectory() : status;
  }
  if (errno != EXDEV) return ErrnoError(absl::StrCat("rename ", from->Path(file), " to"), Path(file));

  const absl::StatusOr<std::unique_ptr<File>> source = from->Read(name);
  if (!source.ok()) return source.status();
  status = WriteFile(name, true, [&](int fd, const std::string& path) {
    std::string piece;
    for (;;) {
      absl::Status copied = (*source)->Next(&piece);
      if (!copied.ok() || piece.empty()) return copied;
      if (copied = WriteAll(options_.fail_io, fd, piece, path); !copied.ok()) return copied;
    }
  });
  if (!status.ok()) return status;
  status = from->Remove(name);
  if (!status.ok()) Unlink(file);
  return status;
}

}  // namespace attnd

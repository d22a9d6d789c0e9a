// Sessions to disk and back, as the server spills and restores them, beside plain reads and writes of as many bytes in
// the same directory.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/block_layout.h"
#include "server/cache/snapshot.h"
#include "server/cache/snapshot_store.h"
#include "tests/bench/measure.h"
#include "tests/bench/modes.h"
#include "tests/bench/report.h"

namespace attnd::bench {
namespace {

// Of the plain reads' buffer: some processors copy from a file's pages at a fifth of their speed to what lies a few
// bytes behind a page's start, which is where malloc puts a megabyte.
constexpr size_t kPageBytes = 4096;
constexpr char kName[] = "00000000000000000000000000000000";

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "attnd_bench: %s\n", what.c_str());
  std::exit(1);
}

void Expect(const absl::Status& status) {
  if (!status.ok()) Die(std::string(status.message()));
}

// A directory of its own under --directory, gone at the end.
class Scratch {
 public:
  explicit Scratch(const std::string& parent) : path_(parent + "/attnd_bench_XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) Die("cannot make a directory in " + parent + " (--directory)");
  }
  ~Scratch() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class Storage {
 public:
  Storage(const Case& c, const std::string& directory)
      : case_(c),
        layout_(c.kv_shape()),
        scratch_(directory),
        plain_file_(scratch_.path() + "/plain"),
        kept_file_(scratch_.path() + "/kept/" + kName + ".attnd"),
        buffer_(static_cast<char*>(std::aligned_alloc(kPageBytes, kMaxPieceBytes)), std::free) {
    std::memset(buffer_.get(), 'x', kMaxPieceBytes);
    const int64_t blocks = (c.tokens + kBlockTokens - 1) / kBlockTokens * c.layers * c.shape.num_kv_heads;
    const int64_t bytes = blocks * static_cast<int64_t>(layout_.block_bytes);
    // Twice: the session that is written and the one that is read.
    auto pool = BlockPool::Create({2 * bytes, false});
    Expect(pool.status());
    pool_ = *std::move(pool);
    session_ = Open();
    for (int layer = 0; layer < c.layers; layer++) {
      for (int64_t b = 0; b < (c.tokens + kBlockTokens - 1) / kBlockTokens; b++) {
        for (int h = 0; h < c.shape.num_kv_heads; h++) {
          std::memset(session_->Address(session_->block(layer, b, h)), 0, layout_.block_bytes);
        }
      }
    }
    spilled_ = OpenStore("/spilled", false);
    synced_ = OpenStore("/synced", true);
    kept_ = OpenStore("/kept", true);
    Write(kept_.get());  // what is read
  }
  ~Storage() { Close(session_.get()); }

  void Spill() { Write(spilled_.get()); }
  void Save() { Write(synced_.get()); }
  void PlainWrite(bool sync) {
    const int fd = open(plain_file_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) Die("cannot write " + plain_file_);
    for (int64_t left = bytes_; left > 0;) {
      const ssize_t written = write(fd, buffer_.get(), std::min<int64_t>(left, kMaxPieceBytes));
      if (written <= 0) Die("cannot write " + plain_file_);
      left -= written;
    }
    if (sync && fdatasync(fd) != 0) Die("cannot flush " + plain_file_);
    close(fd);
  }
  void Restore() {
    auto file = kept_->Read(kName);
    Expect(file.status());
    SnapshotReader reader;
    std::unique_ptr<SessionCache> cache;
    for (std::string piece;;) {
      Expect((*file)->Next(&piece));
      if (piece.empty()) break;
      Expect(reader.Write(piece));
      if (cache != nullptr || reader.header() == nullptr) continue;
      cache = Open();
      Expect(reader.SetTarget(cache.get(), &layout_));
    }
    Expect(reader.Finish());
    Close(cache.get());
  }
  void PlainRead() {
    const int fd = open(kept_file_.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) Die("cannot read " + kept_file_);
    posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    while (read(fd, buffer_.get(), kMaxPieceBytes) > 0) {
    }
    close(fd);
  }
  // Nothing that was written is left, in memory or under way to the disk: a server's file is a new one, too, and the
  // next work's flush is not to wait for this one's.
  void RemoveWritten() {
    unlink(plain_file_.c_str());
    for (SnapshotStore* store : {spilled_.get(), synced_.get()}) {
      if (const absl::Status status = store->Remove(kName); !absl::IsNotFound(status)) Expect(status);
    }
    const int fd = open(scratch_.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || syncfs(fd) != 0) Die("cannot flush " + scratch_.path());
    close(fd);
  }
  // So that the next who reads it goes to the disk.
  void ForgetKept() const {
    const int fd = open(kept_file_.c_str(), O_RDONLY | O_CLOEXEC);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
  }
  double gigabytes() const { return static_cast<double>(bytes_) / 1e9; }

 private:
  std::unique_ptr<SessionCache> Open() {
    auto cache =
        std::make_unique<SessionCache>(pool_.get(), layout_.block_bytes, case_.layers, case_.shape.num_kv_heads);
    const std::vector<int64_t> lengths(case_.layers, case_.tokens), first_tokens(case_.layers, 0);
    if (!cache->AllocateLayers(lengths, first_tokens)) Die("the pool is too small for its sessions");
    return cache;
  }
  static void Close(SessionCache* cache) {
    while (!cache->Release(1 << 20)) {
    }
  }
  std::unique_ptr<SnapshotStore> OpenStore(const std::string& name, bool sync) {
    auto store = SnapshotStore::Open(scratch_.path() + name, {.sync = sync});
    Expect(store.status());
    return *std::move(store);
  }
  void Write(SnapshotStore* store) {
    SnapshotWriter writer(*session_, layout_, {LayoutOf(*session_, case_.kv_shape(), case_.shape.num_kv_heads), ""});
    bytes_ = writer.total_bytes();
    Expect(store->Write(kName, &writer).status());
  }

  const Case case_;
  const BlockLayout layout_;
  const Scratch scratch_;
  const std::string plain_file_, kept_file_;
  const std::unique_ptr<char, void (*)(void*)> buffer_;
  std::unique_ptr<BlockPool> pool_;
  std::unique_ptr<SessionCache> session_;
  std::unique_ptr<SnapshotStore> spilled_, synced_, kept_;
  int64_t bytes_ = 0;
};

void RunCase(const Case& c, const std::string& directory) {
  Storage storage(c, directory);
  enum { kSpill, kPlainWrite, kSave, kPlainSync, kRestore, kPlainRead, kColdRestore, kColdRead };
  const std::vector<double> medians =
      MediansInterleaved(c.seconds,
                         {[&] { storage.Spill(); }, [&] { storage.PlainWrite(false); }, [&] { storage.Save(); },
                          [&] { storage.PlainWrite(true); }, [&] { storage.Restore(); }, [&] { storage.PlainRead(); },
                          [&] { storage.Restore(); }, [&] { storage.PlainRead(); }},
                         [&](size_t work) {
                           if (work <= kPlainSync) storage.RemoveWritten();
                           if (work == kPlainRead || work == kColdRestore)
                             storage.ForgetKept();  // before the cold ones
                         });
  const auto print = [&](const char* name, const char* bound, double seconds, double plain_seconds) {
    Row row;
    row.name = name;
    row.median_us = seconds * 1e6;
    row.value = storage.gigabytes() / seconds;
    row.unit = "GB/s";
    row.roof = storage.gigabytes() / plain_seconds;
    row.bound = bound;
    row.numbers = {{"layers", c.layers}, {"megabytes", storage.gigabytes() * 1e3}};
    Print(c, row);
  };
  print("spill", "write", medians[kSpill], medians[kPlainWrite]);
  print("save_synced", "write", medians[kSave], medians[kPlainSync]);
  print("restore", "read", medians[kRestore], medians[kPlainRead]);
  print("restore_cold", "read", medians[kColdRestore], medians[kColdRead]);
}

}  // namespace

int RunStorage(const Options& options) {
  PrintHeading(options.json);
  return ForEachCase("storage", options, [&](const Case& c) { RunCase(c, options.directory); }) ? 0 : 1;
}

}  // namespace attnd::bench

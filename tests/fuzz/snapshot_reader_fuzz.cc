// Hostile snapshots. The first byte of the input says how the rest, the snapshot, is cut (its lower 7 bits), and
// whether its checksums are made right first (the upper bit), without which a fuzzer would never get past them.
//
// There is one way only to write a session, so what the reader takes must come out of the writer as it went in.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "server/cache/block_pool.h"
#include "server/cache/checksum.h"
#include "server/cache/session_cache.h"
#include "server/cache/snapshot.h"

namespace attnd {
namespace {

constexpr int64_t kCapacityBytes = int64_t{4} << 20;
constexpr int64_t kMaxTableEntries = int64_t{1} << 20;

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

uint32_t Number(const std::string& bytes, size_t at) {
  uint32_t number;
  std::memcpy(&number, bytes.data() + at, sizeof(number));
  return number;
}

// As far as the snapshot goes; sizes that make no sense end it.
void MakeChecksumsRight(std::string* snapshot) {
  constexpr size_t kBodyAt = 16, kBlockBytesAt = 40, kLeastBytes = 48;
  if (snapshot->size() < kLeastBytes) return;
  const uint64_t block_bytes = Number(*snapshot, kBlockBytesAt);
  uint64_t start = 0, end = kBodyAt + Number(*snapshot, kBodyAt - 4), checksum = 0;
  while (end + sizeof(checksum) <= snapshot->size()) {
    checksum = Checksum(snapshot->data() + start, end - start, checksum);
    std::memcpy(snapshot->data() + end, &checksum, sizeof(checksum));
    start = end + sizeof(checksum);
    if (start + 8 > snapshot->size()) return;
    end = start + 8 + Number(*snapshot, start + 4) * block_bytes;
    if (end < start) return;
  }
}

std::string Written(const SessionCache& cache, const BlockLayout& layout, const SnapshotHeader& header) {
  SnapshotWriter writer(cache, layout, header);
  std::string all;
  for (std::string piece; writer.Next(&piece);) all += piece;
  return all;
}

void Read(absl::string_view snapshot, size_t piece_bytes) {
  static BlockPool* const pool = BlockPool::Create({kCapacityBytes, true})->release();
  SnapshotReader reader;
  std::unique_ptr<BlockLayout> layout;
  std::unique_ptr<SessionCache> cache;
  absl::Status status;
  for (size_t at = 0; at < snapshot.size() && status.ok(); at += piece_bytes) {
    status = reader.Write(snapshot.substr(at, piece_bytes));
    if (!status.ok() || reader.header() == nullptr || cache != nullptr) continue;
    const SnapshotLayout& want = reader.header()->layout;
    Require(want.Check().ok(), "a header that is out of bounds");
    layout = std::make_unique<BlockLayout>(want.shape);
    cache = std::make_unique<SessionCache>(pool, layout->block_bytes, want.num_layers(), want.num_kv_heads);
    const bool fits =
        want.NumTableEntries() <= kMaxTableEntries && cache->AllocateLayers(want.lengths, want.first_tokens);
    if (!fits) break;
    status = reader.SetTarget(cache.get(), layout.get());
  }
  Require(reader.complete() == reader.Finish().ok(), "complete() and Finish() disagree");
  Require(!reader.complete() || status.ok(), "complete after an error");
  if (reader.complete())
    Require(Written(*cache, *layout, *reader.header()) == snapshot, "what was read is written otherwise");
  if (cache != nullptr) Require(cache->Release(int64_t{1} << 40), "blocks are left");
  Require(pool->gauges().used_bytes == 0, "memory is left");
}

}  // namespace
}  // namespace attnd

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::string snapshot(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (data[0] & 0x80) attnd::MakeChecksumsRight(&snapshot);
  const size_t cut = data[0] & 0x7f;
  attnd::Read(snapshot, cut == 0 ? std::max<size_t>(snapshot.size(), 1) : cut * cut);
  return 0;
}

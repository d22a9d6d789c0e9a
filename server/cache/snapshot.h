// A session's keys and values as a stream of bytes: to be kept in a file or sent to another server, which may have
// other threads and another instruction set. Equal sessions give equal bytes, whatever their memory held before.
//
// Format, version 1. Numbers are little endian, checksums are XXH3 with 64 bits.
//   magic       8 bytes, kSnapshotMagic
//   version     u32; other than 1 when the order of a block's elements (kernels/block_layout.h) changes, too
//   body_bytes  u32
//   body        u32 dtype (0 F32, 1 BF16, 2 F16, 3 INT8), head_dim, value_dim, num_kv_heads, num_layers, block_tokens,
//               block_bytes, metadata_bytes; then of each layer i64 length, first_token; then the metadata
//   checksum    u64 of all of the above, seed 0
//   frames      u32 kind = 1, u32 blocks, the blocks; then u64 checksum of the three, whose seed is the checksum before
//               it: frames that are lost, repeated or in another order show
//   end         a frame with kind = 2 and no blocks
// Blocks come by layer, block index and kv head, without those that a window has freed, as they lie in memory, but that
// slots from a layer's length on are zero. A frame holds as many as kMaxPieceBytes allows, the last one the rest: there
// is one way only to write a session. Whether bytes were damaged on their way shows; whether a stranger made them does
// not.
#ifndef ATTND_SERVER_CACHE_SNAPSHOT_H_
#define ATTND_SERVER_CACHE_SNAPSHOT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/block_layout.h"
#include "kernels/types.h"
#include "server/cache/checksum.h"
#include "server/cache/session_cache.h"

namespace attnd {

inline constexpr char kSnapshotMagic[] = "\211ATTND\r\n";  // 8 bytes; shows what line-end conversions do
inline constexpr uint32_t kSnapshotVersion = 1;
inline constexpr size_t kMaxPieceBytes = size_t{1} << 20;

struct SnapshotLayout {
  static constexpr int kMaxLayers = 1024;
  static constexpr int kMaxKvHeads = 4096;
  static constexpr int64_t kMaxBlocks = int64_t{1} << 32;  // more than block ids reach

  KvShape shape;
  int num_kv_heads = 0;
  std::vector<int64_t> lengths;       // of each layer, in tokens
  std::vector<int64_t> first_tokens;  // of each layer, the position of the oldest token that it still has

  int num_layers() const { return static_cast<int>(lengths.size()); }
  // Blocks that the session's memory is made of.
  int64_t NumBlocks() const;
  // Entries of its block tables: of blocks that were freed, too. What a restored session costs beside its blocks.
  int64_t NumTableEntries() const;
  // INVALID_ARGUMENT with a sentence when a number is out of bounds. Everything else here REQUIRES that it is OK.
  absl::Status Check() const;
};

// What a session holds now.
SnapshotLayout LayoutOf(const SessionCache& cache, const KvShape& shape, int num_kv_heads);

struct SnapshotHeader {
  static constexpr size_t kMaxMetadataBytes = size_t{256} << 10;

  SnapshotLayout layout;
  std::string metadata;  // the engine's; opaque here
};

// Goes through the blocks of a layout in the order of the format.
class SnapshotWalk {
 public:
  SnapshotWalk() = default;                             // done
  explicit SnapshotWalk(const SnapshotLayout* layout);  // keeps the pointer

  bool done() const { return remaining_ == 0; }
  int64_t remaining() const { return remaining_; }  // blocks, the present one included
  int layer() const { return layer_; }
  int64_t index() const { return index_; }  // of the block, in its layer
  int head() const { return head_; }
  int tokens() const;  // that the block holds, 1..64
  void Next();

 private:
  void SkipEmptyLayers();

  const SnapshotLayout* layout_ = nullptr;
  int64_t remaining_ = 0;
  int layer_ = 0;
  int64_t index_ = 0;
  int head_ = 0;
};

// Writes a snapshot, piece by piece. Reads the blocks as it goes: until the last piece the caller keeps the cache and
// what its blocks hold from changing (a cache that shares the session's blocks does it). Not thread-safe.
class SnapshotWriter {
 public:
  // REQUIRES: header.layout is OK and the cache's; at most kMaxMetadataBytes of metadata.
  SnapshotWriter(const SessionCache& cache, const BlockLayout& layout, SnapshotHeader header);
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  const SnapshotHeader& header() const { return header_; }
  int64_t total_bytes() const { return total_bytes_; }  // of all pieces together
  // The next piece, at most kMaxPieceBytes; false and "" after the last one. Reuse the string: its memory is.
  bool Next(std::string* piece);

 private:
  void WriteHeader(std::string* piece);
  void WriteFrame(std::string* piece);
  void AppendBlock(std::string* piece);
  void AppendChecksum(std::string* piece);

  const SessionCache& cache_;
  const BlockLayout layout_;
  const SnapshotHeader header_;
  const int64_t blocks_per_frame_;
  const int64_t total_bytes_;
  SnapshotWalk walk_;
  uint64_t checksum_ = 0;  // the latest, the seed of the next
  bool started_ = false;
  bool ended_ = false;
};

// Reads a snapshot from bytes that may be cut anywhere:
//
//   SnapshotReader reader;
//   for (each piece) {
//     Write(piece);                                               // an error is final
//     if (reader.header() != nullptr && !had_header) {            // look at it, make the cache, then
//       cache.AllocateLayers(layout.lengths, layout.first_tokens);
//       SetTarget(&cache, &block_layout);
//     }
//   }
//   Finish();
//
// Blocks are written into the target as they come: until Finish() is OK it holds nothing that can be used. Memory: a
// block, and what the piece with the header's end holds behind it. Not thread-safe.
class SnapshotReader {
 public:
  SnapshotReader() = default;
  SnapshotReader(const SnapshotReader&) = delete;
  SnapshotReader& operator=(const SnapshotReader&) = delete;

  // INVALID_ARGUMENT, with a sentence on the snapshot, when the bytes are damaged, are of another format or version,
  // have a number out of bounds or a value that no step could have stored, or go on after the end. Once it has failed
  // it fails for ever. FAILED_PRECONDITION: bytes that were written without a target when header() was there already.
  absl::Status Write(absl::string_view bytes);

  // Null until it is complete, its checksum right and all numbers in bounds.
  const SnapshotHeader* header() const { return header_read_ ? &header_ : nullptr; }
  int64_t total_bytes() const { return total_bytes_; }  // of the whole snapshot; 0 before header() is there

  // Both must outlive the reader; the layers have been allocated. Fails as Write does: bytes that came with the
  // header's end are read now. INVALID_ARGUMENT, too, when the target is not what the header wants.
  absl::Status SetTarget(SessionCache* cache, const BlockLayout* layout);

  bool complete() const { return state_ == State::kDone && status_.ok(); }
  // OK when complete; otherwise the error that there was, or INVALID_ARGUMENT that says how much is missing.
  absl::Status Finish() const;

 private:
  enum class State : uint8_t { kPrologue, kBody, kFrameStart, kBlock, kFrameEnd, kDone };

  absl::Status Consume(absl::string_view bytes);
  bool Gather(size_t bytes, absl::string_view* from);
  absl::Status ReadPrologue();
  absl::Status ReadBody();
  absl::Status ReadFrameStart();
  void ReadBlock(absl::string_view* from);
  void StartBlock();
  void EndBlock();
  absl::Status ReadFrameEnd();

  State state_ = State::kPrologue;
  absl::Status status_;
  std::string field_;  // bytes of a part that is not complete yet
  std::string early_;  // bytes behind the header that came before the target
  int64_t received_ = 0;
  size_t body_bytes_ = 0;
  bool header_read_ = false;
  SnapshotHeader header_;
  int64_t total_bytes_ = 0;

  SessionCache* cache_ = nullptr;
  const BlockLayout* layout_ = nullptr;
  SnapshotWalk walk_;
  int64_t frame_ = 0;          // index of the present frame
  int64_t frame_blocks_ = 0;   // of it, still to come
  bool last_frame_ = false;    // the present one is the end
  std::byte* to_ = nullptr;    // where the present block goes: the target's, or scratch_ when it is partial
  size_t block_filled_ = 0;    // bytes
  std::string frame_problem_;  // what is wrong with the frame's values; told once its checksum is known to be right
  std::unique_ptr<std::byte[]> scratch_;

  ChecksumStream stream_;  // of the present frame
  uint64_t checksum_ = 0;  // the latest, the seed of the next
};

}  // namespace attnd

#endif  // ATTND_SERVER_CACHE_SNAPSHOT_H_

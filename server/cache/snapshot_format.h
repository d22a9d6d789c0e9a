// The numbers of the snapshot's format (see snapshot.h) that its writer and its reader share.
#ifndef ATTND_SERVER_CACHE_SNAPSHOT_FORMAT_H_
#define ATTND_SERVER_CACHE_SNAPSHOT_FORMAT_H_

#include <bit>
#include <cstddef>
#include <cstdint>

#include "server/cache/snapshot.h"

namespace attnd {

static_assert(std::endian::native == std::endian::little, "blocks are written as they lie in memory");

inline constexpr size_t kMagicBytes = sizeof(kSnapshotMagic) - 1;
inline constexpr size_t kPrologueBytes = kMagicBytes + 2 * sizeof(uint32_t);
inline constexpr size_t kChecksumBytes = sizeof(uint64_t);
inline constexpr size_t kFrameStartBytes = 2 * sizeof(uint32_t);
inline constexpr size_t kFrameExtraBytes = kFrameStartBytes + kChecksumBytes;
inline constexpr size_t kNumBodyFields = 8;
inline constexpr size_t kLayerBytes = 2 * sizeof(int64_t);
inline constexpr size_t kMinBodyBytes = kNumBodyFields * sizeof(uint32_t);
inline constexpr size_t kMaxBodyBytes =
    kMinBodyBytes + SnapshotLayout::kMaxLayers * kLayerBytes + SnapshotHeader::kMaxMetadataBytes;
static_assert(kPrologueBytes + kMaxBodyBytes + kChecksumBytes <= kMaxPieceBytes);

enum FrameKind : uint32_t { kBlocksFrame = 1, kEndFrame = 2 };

// The format's numbers for KvDType, in its order.
inline constexpr KvDType kDTypes[] = {KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8};

inline int64_t BlocksPerFrame(size_t block_bytes) {
  return static_cast<int64_t>((kMaxPieceBytes - kFrameExtraBytes) / block_bytes);
}

inline int64_t TotalBytes(const SnapshotHeader& header, size_t block_bytes) {
  const int64_t blocks = header.layout.NumBlocks(), per_frame = BlocksPerFrame(block_bytes);
  const int64_t frames = (blocks + per_frame - 1) / per_frame + 1;  // the end is one
  return kPrologueBytes + kMinBodyBytes + header.layout.num_layers() * kLayerBytes + header.metadata.size() +
         kChecksumBytes + blocks * block_bytes + frames * kFrameExtraBytes;
}

}  // namespace attnd

#endif  // ATTND_SERVER_CACHE_SNAPSHOT_FORMAT_H_

#include "server/cache/snapshot.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/append.h"
#include "server/cache/checksum.h"
#include "server/cache/snapshot_format.h"

namespace attnd {
namespace {

int64_t BlockCount(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

template <class T>
void Put(T number, std::string* to) {
  to->append(reinterpret_cast<const char*>(&number), sizeof(number));
}

template <class... Parts>
absl::Status Bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

}  // namespace

// ---- what a snapshot is of
// --------------------------------------------------------------------------------------------

int64_t SnapshotLayout::NumBlocks() const {
  int64_t blocks = 0;
  for (size_t i = 0; i < lengths.size(); i++) blocks += BlockCount(lengths[i]) - first_tokens[i] / kBlockTokens;
  return blocks * num_kv_heads;
}

int64_t SnapshotLayout::NumTableEntries() const {
  int64_t blocks = 0;
  for (const int64_t length : lengths) blocks += BlockCount(length);
  return blocks * num_kv_heads;
}

absl::Status SnapshotLayout::Check() const {
  const auto out_of_range = [](absl::string_view what, int64_t value, int64_t most) {
    return Bad("the snapshot's ", what, " is ", value, ", which is not in 1..", most);
  };
  if (shape.head_dim < 1 || shape.head_dim > kMaxHeadDim) return out_of_range("head_dim", shape.head_dim, kMaxHeadDim);
  if (shape.value_dim < 1 || shape.value_dim > kMaxHeadDim) {
    return out_of_range("value_dim", shape.value_dim, kMaxHeadDim);
  }
  if (num_kv_heads < 1 || num_kv_heads > kMaxKvHeads) return out_of_range("num_kv_heads", num_kv_heads, kMaxKvHeads);
  if (lengths.empty() || lengths.size() > kMaxLayers) {
    return out_of_range("num_layers", static_cast<int64_t>(lengths.size()), kMaxLayers);
  }
  assert(first_tokens.size() == lengths.size());
  for (size_t i = 0; i < lengths.size(); i++) {
    if (lengths[i] < 0 || lengths[i] > SessionCache::kMaxTokens) {
      return Bad("the snapshot's layer ", i, " has ", lengths[i], " tokens; a layer has 0 to ",
                 SessionCache::kMaxTokens);
    }
    if (first_tokens[i] < 0 || first_tokens[i] > lengths[i] || first_tokens[i] % kBlockTokens != 0) {
      return Bad("the snapshot's layer ", i, " of ", lengths[i], " tokens begins at token ", first_tokens[i],
                 ", which is not a block's first one");
    }
  }
  if (NumBlocks() > kMaxBlocks) {
    return Bad("the snapshot is of ", NumBlocks(), " blocks; no server holds more than ", kMaxBlocks);
  }
  return absl::OkStatus();
}

SnapshotLayout LayoutOf(const SessionCache& cache, const KvShape& shape, int num_kv_heads) {
  SnapshotLayout layout;
  layout.shape = shape;
  layout.num_kv_heads = num_kv_heads;
  for (int i = 0; i < cache.num_layers(); i++) {
    layout.lengths.push_back(cache.length(i));
    layout.first_tokens.push_back(cache.first_token(i));
  }
  return layout;
}

SnapshotWalk::SnapshotWalk(const SnapshotLayout* layout) : layout_(layout), remaining_(layout->NumBlocks()) {
  if (remaining_ == 0) return;
  index_ = layout->first_tokens[0] / kBlockTokens;
  SkipEmptyLayers();
}

int SnapshotWalk::tokens() const {
  return static_cast<int>(std::min<int64_t>(kBlockTokens, layout_->lengths[layer_] - index_ * kBlockTokens));
}

void SnapshotWalk::Next() {
  assert(remaining_ > 0);
  remaining_--;
  if (++head_ < layout_->num_kv_heads) return;
  head_ = 0;
  index_++;
  if (remaining_ > 0) SkipEmptyLayers();
}

void SnapshotWalk::SkipEmptyLayers() {
  while (index_ * kBlockTokens >= layout_->lengths[layer_]) {
    layer_++;
    index_ = layout_->first_tokens[layer_] / kBlockTokens;
  }
}

// ---- writing
// ----------------------------------------------------------------------------------------------------------

SnapshotWriter::SnapshotWriter(const SessionCache& cache, const BlockLayout& layout, SnapshotHeader header)
    : cache_(cache),
      layout_(layout),
      header_(std::move(header)),
      blocks_per_frame_(BlocksPerFrame(layout.block_bytes)),
      total_bytes_(TotalBytes(header_, layout.block_bytes)),
      walk_(&header_.layout) {
  assert(header_.layout.Check().ok() && header_.layout.shape == layout.shape);
  assert(header_.layout.num_layers() == cache.num_layers() && layout.block_bytes == cache.block_bytes());
  assert(header_.metadata.size() <= SnapshotHeader::kMaxMetadataBytes);
}

bool SnapshotWriter::Next(std::string* piece) {
  piece->clear();
  if (ended_) return false;
  if (std::exchange(started_, true)) {
    WriteFrame(piece);
  } else {
    WriteHeader(piece);
  }
  return true;
}

void SnapshotWriter::WriteHeader(std::string* piece) {
  const SnapshotLayout& layout = header_.layout;
  const size_t body_bytes = kMinBodyBytes + layout.num_layers() * kLayerBytes + header_.metadata.size();
  piece->reserve(kPrologueBytes + body_bytes + kChecksumBytes);
  piece->append(kSnapshotMagic, kMagicBytes);
  const auto dtype = std::find(std::begin(kDTypes), std::end(kDTypes), layout.shape.dtype) - std::begin(kDTypes);
  for (const int64_t field :
       {int64_t{kSnapshotVersion}, static_cast<int64_t>(body_bytes), static_cast<int64_t>(dtype),
        int64_t{layout.shape.head_dim}, int64_t{layout.shape.value_dim}, int64_t{layout.num_kv_heads},
        int64_t{layout.num_layers()}, int64_t{kBlockTokens}, static_cast<int64_t>(layout_.block_bytes),
        static_cast<int64_t>(header_.metadata.size())}) {
    Put(static_cast<uint32_t>(field), piece);
  }
  for (int i = 0; i < layout.num_layers(); i++) {
    Put(layout.lengths[i], piece);
    Put(layout.first_tokens[i], piece);
  }
  piece->append(header_.metadata);
  AppendChecksum(piece);
}

void SnapshotWriter::WriteFrame(std::string* piece) {
  const int64_t blocks = std::min(blocks_per_frame_, walk_.remaining());
  ended_ = blocks == 0;
  piece->reserve(blocks * layout_.block_bytes + kFrameExtraBytes);
  Put(uint32_t{ended_ ? kEndFrame : kBlocksFrame}, piece);
  Put(static_cast<uint32_t>(blocks), piece);
  for (int64_t i = 0; i < blocks; i++, walk_.Next()) AppendBlock(piece);
  AppendChecksum(piece);
}

void SnapshotWriter::AppendBlock(std::string* piece) {
  const std::byte* const block = cache_.Address(cache_.block(walk_.layer(), walk_.index(), walk_.head()));
  if (walk_.tokens() == kBlockTokens) {
    piece->append(reinterpret_cast<const char*>(block), layout_.block_bytes);
    return;
  }
  const size_t start = piece->size();
  piece->append(layout_.block_bytes, '\0');
  CopyTokens(layout_, block, walk_.tokens(), reinterpret_cast<std::byte*>(piece->data() + start));
}

void SnapshotWriter::AppendChecksum(std::string* piece) {
  checksum_ = Checksum(piece->data(), piece->size(), checksum_);
  Put(checksum_, piece);
}

}  // namespace attnd

#include <algorithm>
#include <cassert>
#include <cfloat>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "kernels/append.h"
#include "server/cache/checksum.h"
#include "server/cache/snapshot.h"
#include "server/cache/snapshot_format.h"

namespace attnd {
namespace {

template <class T>
T Take(absl::string_view* from) {
  T number;
  std::memcpy(&number, from->data(), sizeof(number));
  from->remove_prefix(sizeof(number));
  return number;
}

template <class... Parts>
absl::Status Bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// Whether it holds what WriteTokens could have written: finite values, and of INT8 elements and scales in their range.
bool HasStorableValues(const BlockLayout& layout, const std::byte* block) {
  switch (layout.shape.dtype) {
    case KvDType::kF32:
      return FindNonFinite(block, DType::kF32, layout.block_bytes / sizeof(float)) < 0;
    case KvDType::kBf16:
      return FindNonFinite(block, DType::kBf16, layout.block_bytes / sizeof(uint16_t)) < 0;
    case KvDType::kF16:
      return FindNonFinite(block, DType::kF16, layout.block_bytes / sizeof(uint16_t)) < 0;
    case KvDType::kInt8:
      break;
  }
  // The products' sums are bounded for elements of at most 127.
  const size_t v = layout.PanelOffset(0);
  if (std::memchr(block, 0x80, layout.KScalesOffset()) != nullptr) return false;
  if (std::memchr(block + v, 0x80, layout.block_bytes - v) != nullptr) return false;
  bool good = true;
  for (const size_t scales : {layout.KScalesOffset(), layout.VScalesOffset()}) {
    for (int i = 0; i < kBlockTokens; i++) {
      float scale;
      std::memcpy(&scale, block + scales + i * sizeof(float), sizeof(float));
      good &= scale >= 0.0f && scale <= FLT_MAX / 127.0f;
    }
  }
  return good;
}

}  // namespace

absl::Status SnapshotReader::Write(absl::string_view bytes) {
  if (!status_.ok()) return status_;
  if (header_read_ && cache_ == nullptr && !bytes.empty()) {
    return absl::FailedPreconditionError("the snapshot's blocks came before there was a place for them");
  }
  received_ += static_cast<int64_t>(bytes.size());
  return status_ = Consume(bytes);
}

absl::Status SnapshotReader::SetTarget(SessionCache* cache, const BlockLayout* layout) {
  assert(header_read_ && cache_ == nullptr);
  if (!status_.ok()) return status_;
  const SnapshotLayout& want = header_.layout;
  if (layout->shape != want.shape || cache->block_bytes() != layout->block_bytes ||
      cache->num_layers() != want.num_layers()) {
    return status_ = Bad("the snapshot's blocks have another layout than the session that they are to go to");
  }
  const SnapshotLayout have = LayoutOf(*cache, want.shape, want.num_kv_heads);
  if (have.lengths != want.lengths || have.first_tokens != want.first_tokens) {
    return status_ = Bad("the snapshot's layers are not as long as those of the session that they are to go to");
  }
  cache_ = cache;
  layout_ = layout;
  walk_ = SnapshotWalk(&header_.layout);
  scratch_ = std::make_unique<std::byte[]>(layout->block_bytes);
  const std::string early = std::move(early_);
  return status_ = Consume(early);
}

absl::Status SnapshotReader::Finish() const {
  if (!status_.ok() || complete()) return status_;
  if (!header_read_) return Bad("the snapshot ends after ", received_, " bytes, before its header does");
  return Bad("the snapshot ends after ", received_, " of ", total_bytes_, " bytes");
}

absl::Status SnapshotReader::Consume(absl::string_view bytes) {
  absl::Status status;
  while (status.ok() && !bytes.empty()) {
    if (header_read_ && cache_ == nullptr) {
      early_ = std::string(bytes);
      break;
    }
    switch (state_) {
      case State::kPrologue:
        Gather(kPrologueBytes, &bytes);
        status = ReadPrologue();
        break;
      case State::kBody:
        if (Gather(kPrologueBytes + body_bytes_ + kChecksumBytes, &bytes)) status = ReadBody();
        break;
      case State::kFrameStart:
        if (Gather(kFrameStartBytes, &bytes)) status = ReadFrameStart();
        break;
      case State::kBlock:
        ReadBlock(&bytes);
        break;
      case State::kFrameEnd:
        if (Gather(kChecksumBytes, &bytes)) status = ReadFrameEnd();
        break;
      case State::kDone:
        status = Bad("the snapshot goes on after its end, at byte ", total_bytes_);
        break;
    }
  }
  return status;
}

// Moves bytes to field_ until it has as many; whether it has.
bool SnapshotReader::Gather(size_t bytes, absl::string_view* from) {
  const size_t taken = std::min(bytes - field_.size(), from->size());
  field_.append(from->data(), taken);
  from->remove_prefix(taken);
  return field_.size() == bytes;
}

absl::Status SnapshotReader::ReadPrologue() {
  if (std::memcmp(field_.data(), kSnapshotMagic, std::min(field_.size(), kMagicBytes)) != 0) {
    return Bad("the bytes are not a snapshot of a session: they do not begin as one");
  }
  if (field_.size() < kPrologueBytes) return absl::OkStatus();
  absl::string_view from = absl::string_view(field_).substr(kMagicBytes);
  const auto version = Take<uint32_t>(&from);
  if (version != kSnapshotVersion) {
    return Bad("the snapshot has format version ", version, "; this is for version ", kSnapshotVersion);
  }
  body_bytes_ = Take<uint32_t>(&from);
  if (body_bytes_ < kMinBodyBytes || body_bytes_ > kMaxBodyBytes) {
    return Bad("the snapshot's header is damaged: it has ", body_bytes_, " bytes, which is not in ", kMinBodyBytes,
               "..", kMaxBodyBytes);
  }
  state_ = State::kBody;
  return absl::OkStatus();
}

absl::Status SnapshotReader::ReadBody() {
  absl::string_view end = absl::string_view(field_).substr(kPrologueBytes + body_bytes_);
  checksum_ = Checksum(field_.data(), kPrologueBytes + body_bytes_, 0);
  if (Take<uint64_t>(&end) != checksum_) return Bad("the snapshot's header is damaged: its checksum is wrong");

  absl::string_view body = absl::string_view(field_).substr(kPrologueBytes, body_bytes_);
  uint32_t fields[kNumBodyFields];
  for (uint32_t& field : fields) field = Take<uint32_t>(&body);
  const auto [dtype, head_dim, value_dim, num_kv_heads, num_layers, block_tokens, block_bytes, metadata_bytes] = fields;
  if (num_layers > SnapshotLayout::kMaxLayers || metadata_bytes > SnapshotHeader::kMaxMetadataBytes ||
      body.size() != num_layers * kLayerBytes + metadata_bytes) {
    return Bad("the snapshot's header of ", body_bytes_, " bytes does not hold ", num_layers, " layers and ",
               metadata_bytes, " bytes of metadata");
  }
  if (dtype >= std::size(kDTypes)) return Bad("the snapshot's element type is number ", dtype, ", which is unknown");
  SnapshotLayout& layout = header_.layout;
  // What does not fit an int is out of bounds, too.
  layout.shape = {static_cast<int>(head_dim), static_cast<int>(value_dim), kDTypes[dtype]};
  layout.num_kv_heads = static_cast<int>(num_kv_heads);
  for (uint32_t i = 0; i < num_layers; i++) {
    layout.lengths.push_back(Take<int64_t>(&body));
    layout.first_tokens.push_back(Take<int64_t>(&body));
  }
  if (absl::Status status = layout.Check(); !status.ok()) return status;
  const size_t expected = BlockLayout(layout.shape).block_bytes;
  if (block_tokens != kBlockTokens || block_bytes != expected) {
    return Bad("the snapshot's blocks have ", block_bytes, " bytes and ", block_tokens, " tokens; here they have ",
               expected, " and ", kBlockTokens);
  }
  header_.metadata = std::string(body);
  total_bytes_ = TotalBytes(header_, block_bytes);
  field_ = std::string();
  header_read_ = true;
  state_ = State::kFrameStart;
  return absl::OkStatus();
}

absl::Status SnapshotReader::ReadFrameStart() {
  stream_.Start(checksum_);
  stream_.Add(field_.data(), field_.size());
  absl::string_view from = field_;
  const auto kind = Take<uint32_t>(&from), blocks = Take<uint32_t>(&from);
  field_.clear();
  frame_blocks_ = std::min(BlocksPerFrame(layout_->block_bytes), walk_.remaining());
  if (kind != (frame_blocks_ == 0 ? kEndFrame : kBlocksFrame) || blocks != frame_blocks_) {
    return Bad("frame ", frame_, " of the snapshot is damaged: it begins as another one");
  }
  if (frame_blocks_ == 0) {
    last_frame_ = true;
    state_ = State::kFrameEnd;
  } else {
    StartBlock();
  }
  return absl::OkStatus();
}

void SnapshotReader::StartBlock() {
  state_ = State::kBlock;
  block_filled_ = 0;
  const bool whole = walk_.tokens() == kBlockTokens;
  to_ = whole ? cache_->Address(cache_->block(walk_.layer(), walk_.index(), walk_.head())) : scratch_.get();
}

void SnapshotReader::ReadBlock(absl::string_view* from) {
  const size_t bytes = std::min(layout_->block_bytes - block_filled_, from->size());
  stream_.Add(from->data(), bytes);
  std::memcpy(to_ + block_filled_, from->data(), bytes);
  from->remove_prefix(bytes);
  block_filled_ += bytes;
  if (block_filled_ == layout_->block_bytes) EndBlock();
}

void SnapshotReader::EndBlock() {
  const auto problem = [&](absl::string_view what) {
    if (!frame_problem_.empty()) return;
    const int64_t first = walk_.index() * kBlockTokens;
    frame_problem_ = absl::StrCat("the snapshot's tokens ", first, "..", first + walk_.tokens() - 1, " of layer ",
                                  walk_.layer(), " and kv head ", walk_.head(), what);
  };
  if (!HasStorableValues(*layout_, to_)) problem(" have a value that no session can have stored");
  if (walk_.tokens() < kBlockTokens) {
    std::byte* const block = cache_->Address(cache_->block(walk_.layer(), walk_.index(), walk_.head()));
    std::memset(block, 0, layout_->block_bytes);
    CopyTokens(*layout_, to_, walk_.tokens(), block);
    if (std::memcmp(block, to_, layout_->block_bytes) != 0) problem(" are followed by others in their block");
  }
  walk_.Next();
  if (--frame_blocks_ > 0) {
    StartBlock();
  } else {
    state_ = State::kFrameEnd;
  }
}

absl::Status SnapshotReader::ReadFrameEnd() {
  absl::string_view from = field_;
  checksum_ = stream_.Result();
  if (Take<uint64_t>(&from) != checksum_) {
    return Bad("frame ", frame_, " of the snapshot is damaged: its checksum is wrong");
  }
  field_.clear();
  if (!frame_problem_.empty()) return absl::InvalidArgumentError(frame_problem_);
  frame_++;
  state_ = last_frame_ ? State::kDone : State::kFrameStart;
  return absl::OkStatus();
}

}  // namespace attnd

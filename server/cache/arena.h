// The one piece of address space that all KV blocks lie in, cut into pages of 2 MiB.
//
// Memory is committed by the kernel when a page is first written, as huge pages where it grants them. The range holds
// one page in sixteen, and eight, more than the capacity: a page serves blocks of one size at a time, so its end and
// the holes of other sizes' pages are lost. What may be used is counted in bytes of blocks, by BlockPool.
//
// Thread-safe: immutable after creation.
#ifndef ATTND_SERVER_CACHE_ARENA_H_
#define ATTND_SERVER_CACHE_ARENA_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"

namespace attnd {

class Arena {
 public:
  static constexpr size_t kPageBytes = size_t{2} << 20;
  static constexpr int64_t kMaxPages = int64_t{1} << 19;  // 1 TiB: what 32-bit block ids reach

  // INVALID_ARGUMENT when the capacity is not positive or beyond kMaxPages; RESOURCE_EXHAUSTED when the address space
  // cannot be had.
  static absl::StatusOr<std::unique_ptr<Arena>> Create(int64_t capacity_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint32_t num_pages() const { return num_pages_; }
  std::byte* page(uint32_t index) const { return base_ + size_t{index} * kPageBytes; }

 private:
  Arena(void* mapping, size_t mapping_bytes, uint32_t num_pages);

  void* const mapping_;
  const size_t mapping_bytes_;
  std::byte* const base_;  // the mapping's first multiple of kPageBytes
  const uint32_t num_pages_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_CACHE_ARENA_H_

#include "server/cache/arena.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace attnd {
namespace {

int64_t PagesFor(int64_t capacity_bytes) {
  const int64_t pages = (capacity_bytes - 1) / static_cast<int64_t>(Arena::kPageBytes) + 1;
  return pages + pages / 16 + 8;
}

std::byte* AlignToPage(void* p) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  return reinterpret_cast<std::byte*>((address + Arena::kPageBytes - 1) & ~(uintptr_t{Arena::kPageBytes} - 1));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(int64_t capacity_bytes) {
  if (capacity_bytes <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("kv_cache_bytes must be positive, got ", capacity_bytes));
  }
  const int64_t pages = PagesFor(capacity_bytes);
  if (pages > kMaxPages) {
    return absl::InvalidArgumentError(absl::StrCat("kv_cache_bytes of ", capacity_bytes, " needs ", pages,
                                                   " pages of 2 MiB; at most ", kMaxPages, " are supported"));
  }
  const size_t bytes = static_cast<size_t>(pages + 1) * kPageBytes;  // one more, to align
  // NORESERVE: the kernel must not hold the whole capacity against the overcommit limit before it is used.
  void* mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot map ", bytes, " bytes of address space for the cache: ", std::strerror(errno)));
  }
  // Refused where transparent huge pages are off: then it works with small pages.
  (void)madvise(mapping, bytes, MADV_HUGEPAGE);
  return std::unique_ptr<Arena>(new Arena(mapping, bytes, static_cast<uint32_t>(pages)));
}

Arena::Arena(void* mapping, size_t mapping_bytes, uint32_t num_pages)
    : mapping_(mapping), mapping_bytes_(mapping_bytes), base_(AlignToPage(mapping)), num_pages_(num_pages) {}

Arena::~Arena() { munmap(mapping_, mapping_bytes_); }

}  // namespace attnd

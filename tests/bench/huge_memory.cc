#include "tests/bench/huge_memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace attnd::bench {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};

}  // namespace

std::byte* HugeMemory(size_t bytes) {
  static std::unique_ptr<std::byte, Free> memory;
  static size_t memory_bytes = 0;
  if (bytes <= memory_bytes) return memory.get();
  memory.reset();  // before the next one: both at once could be more than there is
  memory_bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  memory.reset(static_cast<std::byte*>(std::aligned_alloc(kHugePage, memory_bytes)));
  if (memory == nullptr) {
    std::fprintf(stderr, "attnd_bench: no memory for %zu bytes\n", memory_bytes);
    std::exit(1);
  }
  madvise(memory.get(), memory_bytes, MADV_HUGEPAGE);
  std::memset(memory.get(), 0, memory_bytes);
  return memory.get();
}

}  // namespace attnd::bench

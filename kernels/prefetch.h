// Prefetching whole stretches. Inlined by force: GCC drops calls of functions that do nothing but prefetch.
#ifndef ATTND_KERNELS_PREFETCH_H_
#define ATTND_KERNELS_PREFETCH_H_

#include <cstddef>

namespace attnd {

inline constexpr size_t kCacheLine = 64;

__attribute__((always_inline)) inline void PrefetchToL1(const std::byte* p, size_t bytes) {
  for (size_t line = 0; line < bytes; line += kCacheLine) __builtin_prefetch(p + line, 0, 3);
}
__attribute__((always_inline)) inline void PrefetchToL2(const std::byte* p, size_t bytes) {
  for (size_t line = 0; line < bytes; line += kCacheLine) __builtin_prefetch(p + line, 0, 2);
}

}  // namespace attnd

#endif  // ATTND_KERNELS_PREFETCH_H_

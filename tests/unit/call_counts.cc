#include "tests/unit/call_counts.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <cstddef>

#include "oneapi/dnnl/dnnl_ukernel.h"

namespace attnd::testing {
namespace {

constinit std::atomic<int64_t> allocations{0}, onednn_allocations{0}, onednn_executions{0}, onednn_creations{0},
    executable_pages{0}, pthread_locks{0};
constinit thread_local int inside_onednn = 0;

void Count(std::atomic<int64_t>* counter) { counter->fetch_add(1, std::memory_order_relaxed); }
void CountAllocation() { Count(inside_onednn > 0 ? &onednn_allocations : &allocations); }

class InsideOneDnn {
 public:
  InsideOneDnn() { ++inside_onednn; }
  ~InsideOneDnn() { --inside_onednn; }
};

// The function that this executable hides.
template <class Function>
Function* Hidden(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// absl_lock_counts.cc has one that counts.
[[gnu::weak]] int64_t AbslLocks() { return 0; }

CallCounts CountedCalls() {
  return {allocations,      onednn_allocations, onednn_executions, onednn_creations,
          executable_pages, pthread_locks,      AbslLocks()};
}

}  // namespace attnd::testing

// ---- glibc: a function of the executable's goes before the library's of the same name ----

using attnd::testing::Count;
using attnd::testing::CountAllocation;
using attnd::testing::Hidden;

extern "C" {

void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* old, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) {
  CountAllocation();
  return __libc_malloc(bytes);
}

void* calloc(size_t count, size_t bytes) {
  CountAllocation();
  return __libc_calloc(count, bytes);
}

void* realloc(void* old, size_t bytes) {
  CountAllocation();
  return __libc_realloc(old, bytes);
}

void* memalign(size_t alignment, size_t bytes) {
  CountAllocation();
  return __libc_memalign(alignment, bytes);
}

void* aligned_alloc(size_t alignment, size_t bytes) {
  CountAllocation();
  return __libc_memalign(alignment, bytes);
}

int posix_memalign(void** out, size_t alignment, size_t bytes) {
  CountAllocation();
  *out = __libc_memalign(alignment, bytes);
  return *out == nullptr ? ENOMEM : 0;
}

int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  static const auto hidden = Hidden<int(pthread_mutex_t*)>("pthread_mutex_lock");
  Count(&attnd::testing::pthread_locks);
  return hidden(mutex);
}

void* mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) noexcept {
  static const auto hidden = Hidden<void*(void*, size_t, int, int, int, off_t)>("mmap");
  if ((protection & PROT_EXEC) != 0) Count(&attnd::testing::executable_pages);
  return hidden(address, bytes, protection, flags, file, offset);
}

int mprotect(void* address, size_t bytes, int protection) noexcept {
  static const auto hidden = Hidden<int(void*, size_t, int)>("mprotect");
  if ((protection & PROT_EXEC) != 0) Count(&attnd::testing::executable_pages);
  return hidden(address, bytes, protection);
}

// ---- oneDNN: the linker turns our calls (-Wl,--wrap) into these, whether it is a static library or a shared one ----

dnnl_status_t __real_dnnl_brgemm_create(dnnl_brgemm_t* brgemm, dnnl_dim_t m, dnnl_dim_t n, dnnl_dim_t k,
                                        dnnl_dim_t batch, dnnl_dim_t lda, dnnl_dim_t ldb, dnnl_dim_t ldc,
                                        dnnl_data_type_t a, dnnl_data_type_t b, dnnl_data_type_t c);
dnnl_status_t __wrap_dnnl_brgemm_create(dnnl_brgemm_t* brgemm, dnnl_dim_t m, dnnl_dim_t n, dnnl_dim_t k,
                                        dnnl_dim_t batch, dnnl_dim_t lda, dnnl_dim_t ldb, dnnl_dim_t ldc,
                                        dnnl_data_type_t a, dnnl_data_type_t b, dnnl_data_type_t c) {
  Count(&attnd::testing::onednn_creations);
  return __real_dnnl_brgemm_create(brgemm, m, n, k, batch, lda, ldb, ldc, a, b, c);
}

dnnl_status_t __real_dnnl_brgemm_execute(const_dnnl_brgemm_t brgemm, const void* a, const void* b,
                                         const dnnl_dim_t* offsets, void* c, void* scratchpad);
dnnl_status_t __wrap_dnnl_brgemm_execute(const_dnnl_brgemm_t brgemm, const void* a, const void* b,
                                         const dnnl_dim_t* offsets, void* c, void* scratchpad) {
  Count(&attnd::testing::onednn_executions);
  const attnd::testing::InsideOneDnn inside;
  return __real_dnnl_brgemm_execute(brgemm, a, b, offsets, c, scratchpad);
}

dnnl_status_t __real_dnnl_brgemm_set_hw_context(const_dnnl_brgemm_t brgemm);
dnnl_status_t __wrap_dnnl_brgemm_set_hw_context(const_dnnl_brgemm_t brgemm) {
  const attnd::testing::InsideOneDnn inside;
  return __real_dnnl_brgemm_set_hw_context(brgemm);
}

}  // extern "C"

// Counts what a steady path must not do: allocate, lock, make code executable. For a test with an executable of its
// own, which replaces the functions of glibc that it counts; not under sanitizers, which replace them too.
#ifndef ATTND_TESTS_UNIT_CALL_COUNTS_H_
#define ATTND_TESTS_UNIT_CALL_COUNTS_H_

#include <cstdint>

namespace attnd::testing {

// Of all threads, since the process began.
struct CallCounts {
  int64_t allocations = 0;         // malloc and its kin (operator new is one of them), but for oneDNN's
  int64_t onednn_allocations = 0;  // made inside dnnl_brgemm_execute or _set_hw_context
  int64_t onednn_executions = 0;   // of dnnl_brgemm_execute
  int64_t onednn_creations = 0;    // of dnnl_brgemm_create
  int64_t executable_pages = 0;    // calls of mmap and mprotect that ask for PROT_EXEC
  int64_t pthread_locks = 0;       // pthread_mutex_lock: std::mutex
  int64_t absl_locks = 0;          // absl::Mutex::Lock, where absl_lock_counts.cc is linked in

  CallCounts operator-(const CallCounts& o) const {
    return {allocations - o.allocations,
            onednn_allocations - o.onednn_allocations,
            onednn_executions - o.onednn_executions,
            onednn_creations - o.onednn_creations,
            executable_pages - o.executable_pages,
            pthread_locks - o.pthread_locks,
            absl_locks - o.absl_locks};
  }
};

CallCounts CountedCalls();
int64_t AbslLocks();

}  // namespace attnd::testing

#endif  // ATTND_TESTS_UNIT_CALL_COUNTS_H_

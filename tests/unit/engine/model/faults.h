// Failures that a test asks for: of an allocation of cache memory, or of a system call on a file. Each happens once.
#ifndef ATTND_TESTS_UNIT_ENGINE_MODEL_FAULTS_H_
#define ATTND_TESTS_UNIT_ENGINE_MODEL_FAULTS_H_

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string_view>

namespace attnd {

class Faults {
 public:
  struct Counts {
    // An open may be for reading or for writing: it counts as both. later: what may be tried again.
    int64_t allocations = 0, reads = 0, later = 0, removals = 0, writes = 0;
    int64_t io() const { return reads + later + removals + writes; }
  };

  // The allocation after `skip` others fails; so does the call on a file, with `error`.
  void FailAllocation(int skip) { allocation_in_ = skip + 1; }
  void FailIo(int skip, int error) {
    error_ = error;
    io_in_ = skip + 1;
  }
  void Disarm() { allocation_in_ = io_in_ = 0; }

  Counts counts() const { return {allocations_, reads_, later_, removals_, writes_}; }

  // For the engine. Thread-safe.
  bool OnAllocation() {
    if (!IsNext(&allocation_in_)) return false;
    allocations_++;
    return true;
  }
  int OnIo(std::string_view call) {
    if (!IsNext(&io_in_)) return 0;
    // Too many files are open: that is no reason to give a session up.
    if (call == "read" || call == "open") (error_ == EMFILE ? later_ : reads_)++;
    if (call == "unlink") removals_++;
    if (call != "read" && call != "unlink") writes_++;
    return error_;
  }

 private:
  static bool IsNext(std::atomic<int>* in) {
    int now = in->load(std::memory_order_relaxed);
    while (now > 0 && !in->compare_exchange_weak(now, now - 1)) {
    }
    return now == 1;
  }

  std::atomic<int> allocation_in_{0}, io_in_{0}, error_{0};
  std::atomic<int64_t> allocations_{0}, reads_{0}, later_{0}, removals_{0}, writes_{0};
};

}  // namespace attnd

#endif  // ATTND_TESTS_UNIT_ENGINE_MODEL_FAULTS_H_

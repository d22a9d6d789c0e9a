// The oneDNN BRGeMM ukernel: C[m, n] = sum over a batch of A[m, k] x B[k, n], from zero. Objects are generated once per
// shape and process and shared by all threads. Everything that oneDNN reports as an error ends here, at creation, as a
// null pointer.
#ifndef ATTND_KERNELS_BRGEMM_H_
#define ATTND_KERNELS_BRGEMM_H_

#include <cstddef>
#include <cstdint>
#include <memory>

namespace attnd {

// bf16 B is in VNNI pairs [k / 2][n][2]; f32 B is [k][n]. Both have n as leading dimension. C is f32.
struct BrgemmShape {
  bool bf16 = false;
  int m = 0;
  int n = 0;
  int k = 0;
  int batch = 0;
  int lda = 0;
  int ldc = 0;
  friend auto operator<=>(const BrgemmShape&, const BrgemmShape&) = default;
};

// Bytes from the base pointers to the operands of one member of the batch. The layout that the C interface reads.
struct BrgemmOffsets {
  int64_t a = 0;
  int64_t b = 0;
};

class Brgemm {
 public:
  // The process's object of this shape, or null where this machine or oneDNN has none. Thread-safe; takes a lock.
  static const Brgemm* Get(const BrgemmShape& shape);

  ~Brgemm();
  Brgemm(const Brgemm&) = delete;
  Brgemm& operator=(const Brgemm&) = delete;

  // On AMX the tiles are configured per thread: SetContext before the first Execute and whenever the thread turns to
  // another object; ReleaseContext before the thread leaves the kernels.
  void SetContext() const;
  static void ReleaseContext();

  // `offsets` has shape().batch members. `scratchpad` is the calling thread's, of at least kScratchpadBytes, aligned to
  // 64. False: oneDNN failed, C is unspecified.
  bool Execute(const void* a, const void* b, const BrgemmOffsets* offsets, float* c, void* scratchpad) const;

  // What a thread keeps for all objects; an object that asks for more is not used. (AMX of 3.7 asks for 4 KiB.)
  static constexpr size_t kScratchpadBytes = 64 * 1024;

 private:
  Brgemm(const BrgemmShape& shape, void* handle) : shape_(shape), handle_(handle) {}
  static std::unique_ptr<Brgemm> Create(const BrgemmShape& shape);

  BrgemmShape shape_;
  void* handle_;
};

}  // namespace attnd

#endif  // ATTND_KERNELS_BRGEMM_H_

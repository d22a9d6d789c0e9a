// Tries a shape's ukernels on random data beside the streaming kernel, which is plain enough to be trusted.
#ifndef ATTND_KERNELS_UKERNEL_TRIAL_H_
#define ATTND_KERNELS_UKERNEL_TRIAL_H_

#include <cstddef>

#include "kernels/aligned_buffer.h"
#include "kernels/shape_kernels.h"

namespace attnd {

class UkernelTrial {
 public:
  enum class Outcome { kSameBits, kClose, kWrong };

  explicit UkernelTrial(const ShapeKernels& kernels);

  // With the streaming mode that the kernels have set at the moment.
  Outcome Compare();

 private:
  Outcome CompareRows(int rows, int slots);
  static Outcome CompareFloats(const float* x, const float* y, int rows, size_t ld, int columns, double terms);

  const ShapeKernels& kernels_;
  AlignedBuffer blocks_, scratch_;
  // The same values as the ukernel and as the streaming kernel hold them.
  struct Operand {
    AlignedBuffer bf16, f32;
    std::byte* As(bool narrow) const { return (narrow ? bf16 : f32).As<std::byte>(); }
  };
  Operand q_, weights_;
  AlignedBuffer results_[2];
};

}  // namespace attnd

#endif  // ATTND_KERNELS_UKERNEL_TRIAL_H_

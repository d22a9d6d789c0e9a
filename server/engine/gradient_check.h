// The end of a backward call: its sinks' gradients, and that every gradient is a float.
//
// Used by the compute thread only.
#ifndef ATTND_SERVER_ENGINE_GRADIENT_CHECK_H_
#define ATTND_SERVER_ENGINE_GRADIENT_CHECK_H_

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "server/engine/job.h"

namespace attnd {

class GradientCheck {
 public:
  using Task = absl::FunctionRef<void(int64_t task, int thread)>;
  using ForEach = absl::FunctionRef<void(int64_t tasks, double estimated_us, Task)>;

  // Of the backward runs that end with their chunk: writes d_sinks, and leaves GRADIENT_OVERFLOW in the status of each
  // that has a gradient beyond float's range.
  void Run(absl::Span<const ChunkWork> chunks, ForEach for_each);

 private:
  enum class What : uint8_t { kDSinks, kDQ, kDK, kDV };
  // A piece of one gradient; `bad` is its first bad element. Of d_sinks: one head.
  struct Unit {
    SegmentRun* run;
    What what;
    int64_t first_element, count;
    int64_t bad;
  };
  struct Gradient {
    absl::string_view name;
    const float* data;
    int64_t rows;
    int heads, dim;
    int64_t elements() const { return rows * heads * dim; }
  };
  static Gradient GradientOf(const BackwardWork& work, What what);
  static absl::Status OverflowError(const Unit& unit);
  static void Check(Unit* unit);
  void Add(SegmentRun* run);

  std::vector<Unit> units_;  // kept from batch to batch for its memory
};

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_GRADIENT_CHECK_H_

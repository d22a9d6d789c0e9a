// What is refused by looking at the numbers: values that cannot be stored, and query rows with no allowed key.
//
// Used by the compute thread only.
#ifndef ATTND_SERVER_ENGINE_INPUT_CHECK_H_
#define ATTND_SERVER_ENGINE_INPUT_CHECK_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "kernels/types.h"
#include "server/engine/job.h"

namespace attnd {

// Index of the first of `count` elements that is infinite or NaN, or would become infinite when rounded to `kv_dtype`
// (3.4e38 is a float, but no bfloat16, and 65520 is no float16); -1: none.
int64_t FindUnstorable(const std::byte* data, DType dtype, int64_t count, KvDType kv_dtype);

class InputCheck {
 public:
  using Task = absl::FunctionRef<void(int64_t task, int thread)>;
  using ForEach = absl::FunctionRef<void(int64_t tasks, int64_t bytes, Task)>;  // `bytes` are read in all

  // Leaves NOT_FINITE or EMPTY_ROW in the status of each run that fails. All of a run is checked with its first chunk:
  // a bad number in the last row of a long prefill is told at once, and nothing that cannot be stored is ever written.
  void Run(absl::Span<const ChunkWork> chunks, ForEach for_each);

 private:
  enum class What : uint8_t { kQ, kK, kV, kDOut, kEmptyRow };
  // A piece of checking; `bad` is the first bad element of the tensor, or the first empty row.
  struct Unit {
    SegmentRun* run;
    What what;
    int64_t first_element, count;
    int64_t bad;
  };
  static const TensorView& TensorOf(const Unit& unit);
  static void Check(Unit* unit);
  void Add(SegmentRun* run, What what, const TensorView& tensor, int64_t rows);

  std::vector<Unit> units_;  // kept from batch to batch for its memory
};

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_INPUT_CHECK_H_

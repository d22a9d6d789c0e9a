// Whether a caller's tensor can be stored: every value finite, and finite still in the cache's element type.
//
// Thread-safe: pure functions.
#ifndef ATTND_SERVER_ENGINE_FINITE_CHECK_H_
#define ATTND_SERVER_ENGINE_FINITE_CHECK_H_

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace attnd {

// Index of the first of `count` elements that is infinite or NaN, or would become infinite when rounded to `kv_dtype`
// (3.4e38 is a float, but no bfloat16); -1: none.
int64_t FindUnstorable(const std::byte* data, DType dtype, int64_t count, KvDType kv_dtype);

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_FINITE_CHECK_H_

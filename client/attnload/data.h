// The tensors that sessions send. Random values come from two pools made at the start, so that sending a step costs
// no more than naming a place in a pool, and the check can look the same values up again.
#ifndef ATTND_CLIENT_ATTNLOAD_DATA_H_
#define ATTND_CLIENT_ATTNLOAD_DATA_H_

#include <cstdint>
#include <span>
#include <vector>

#include "client/attnload/plan.h"

namespace attnd::attnload {

enum class TensorKind : uint8_t { kQ, kK, kV };

// Thread-safe once made.
class TensorPool {
 public:
  // `longest`: elements of the largest tensor that is asked for.
  TensorPool(uint64_t seed, int64_t longest);

  // `tokens` rows of `row` elements from `position` on, of one session, layer and kind. The values of overlapping
  // ranges agree. Q is uniform in +-3, K and V in +-1: scores vary by about 1 around 0 then.
  std::span<const float> Rows(int64_t session, int layer, TensorKind kind, int64_t position, int64_t tokens,
                              int64_t row) const;

 private:
  uint64_t seed_;
  std::vector<float> wide_;    // +-3
  std::vector<float> narrow_;  // +-1
};

// V of a kConstant session: [tokens, num_kv_heads, value_dim].
void FillConstant(const Plan& plan, const client::SessionConfig& config, int layer, int64_t tokens,
                  std::vector<float>* v);

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_DATA_H_

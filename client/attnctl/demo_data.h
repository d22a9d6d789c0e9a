// The demo's tensors: pseudo-random, and a function of (seed, session, layer, tensor, element) alone, so that the check
// makes again what the run sent instead of keeping it.
#ifndef ATTND_CLIENT_ATTNCTL_DEMO_DATA_H_
#define ATTND_CLIENT_ATTNCTL_DEMO_DATA_H_

#include <cstdint>
#include <span>

namespace attnd::attnctl {

enum class TensorKind : uint8_t { kQ, kK, kV };

class DemoData {
 public:
  DemoData(uint64_t seed, int64_t session, int layer, TensorKind kind);

  // Elements first, first + 1, ... of the tensor [token, head, dim], uniform in +-3 for Q and +-1 for K and V: scores
  // then vary by about 1 around 0, so that neither one key nor all keys alike decide an output.
  void Fill(int64_t first, std::span<float> out) const;

 private:
  uint64_t key_;
  float amplitude_;
};

}  // namespace attnd::attnctl

#endif  // ATTND_CLIENT_ATTNCTL_DEMO_DATA_H_

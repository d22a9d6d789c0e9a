#include "client/attnctl/demo_data.h"

#include "client/tool/random.h"

namespace attnd::attnctl {

using tool::Mix;

DemoData::DemoData(uint64_t seed, int64_t session, int layer, TensorKind kind)
    : key_(Mix(Mix(Mix(seed) + static_cast<uint64_t>(session)) + static_cast<uint64_t>(layer) * 4 +
               static_cast<uint64_t>(kind))),
      amplitude_(kind == TensorKind::kQ ? 3.0f : 1.0f) {}

void DemoData::Fill(int64_t first, std::span<float> out) const {
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = amplitude_ * tool::SignedUnit(Mix(key_ + static_cast<uint64_t>(first) + i));
  }
}

}  // namespace attnd::attnctl

#include "client/attnctl/demo_data.h"

namespace attnd::attnctl {
namespace {

// The mixing function of SplitMix64: any two inputs give unrelated outputs, so a counter is generator enough.
uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

DemoData::DemoData(uint64_t seed, int64_t session, int layer, TensorKind kind)
    : key_(Mix(Mix(Mix(seed) + static_cast<uint64_t>(session)) + static_cast<uint64_t>(layer) * 4 +
               static_cast<uint64_t>(kind))),
      amplitude_(kind == TensorKind::kQ ? 3.0f : 1.0f) {}

void DemoData::Fill(int64_t first, std::span<float> out) const {
  for (size_t i = 0; i < out.size(); ++i) {
    const uint64_t bits = Mix(key_ + static_cast<uint64_t>(first) + i);
    // 24 bits are exact in a float; the result is in [-1, 1).
    const float unit = static_cast<float>(bits >> 40) * 0x1p-23f - 1.0f;
    out[i] = amplitude_ * unit;
  }
}

}  // namespace attnd::attnctl

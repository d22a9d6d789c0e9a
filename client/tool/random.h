// Pseudo-random numbers as a function of their inputs alone, the same on every machine and in every order of asking.
#ifndef ATTND_CLIENT_TOOL_RANDOM_H_
#define ATTND_CLIENT_TOOL_RANDOM_H_

#include <cstdint>
#include <initializer_list>

namespace attnd::tool {

// The mixing function of SplitMix64: any two inputs give unrelated outputs, so a counter is generator enough.
constexpr uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

constexpr uint64_t Hash(std::initializer_list<uint64_t> parts) {
  uint64_t hash = 0;
  for (const uint64_t part : parts) hash = Mix(hash ^ part);
  return hash;
}

// In [-1, 1): 24 bits are exact in a float.
constexpr float SignedUnit(uint64_t bits) { return static_cast<float>(bits >> 40) * 0x1p-23f - 1.0f; }

// In [0, 1).
constexpr double Unit(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

}  // namespace attnd::tool

#endif  // ATTND_CLIENT_TOOL_RANDOM_H_

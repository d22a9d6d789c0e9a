// Pseudo-random numbers as a function of their inputs alone, the same on every machine and in every order of asking.
#ifndef ATTND_CLIENT_ATTNLOAD_RANDOM_H_
#define ATTND_CLIENT_ATTNLOAD_RANDOM_H_

#include <cstdint>
#include <initializer_list>

namespace attnd::attnload {

// The mixing function of SplitMix64.
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

// In [0, 1).
constexpr double Unit(uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_RANDOM_H_

// Where the model test's choices come from: a seeded generator, or the bytes that a fuzzer brings.
#ifndef ATTND_TESTS_UNIT_ENGINE_MODEL_CHOICES_H_
#define ATTND_TESTS_UNIT_ENGINE_MODEL_CHOICES_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace attnd {

// A fixed hash of 64 bits.
inline uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

class Choices {
 public:
  explicit Choices(uint64_t seed) : state_(seed), random_(true) {}
  explicit Choices(absl::Span<const uint8_t> bytes) : bytes_(bytes) {}

  // No more bytes: all that comes now are zeros.
  bool exhausted() const { return !random_ && next_ >= bytes_.size(); }

  uint8_t Byte() {
    if (!random_) return next_ < bytes_.size() ? bytes_[next_++] : 0;
    if (left_ == 0) word_ = Mix(state_ += 0x9e3779b97f4a7c15), left_ = 8;
    const uint8_t byte = static_cast<uint8_t>(word_);
    word_ >>= 8, left_--;
    return byte;
  }
  // Of 0 to n - 1. REQUIRES: 1 <= n <= 65536.
  int Below(int n) {
    if (n <= 1) return 0;
    if (n <= 256) return Byte() % n;
    const int high = Byte();
    return (high << 8 | Byte()) % n;
  }
  bool OneIn(int n) { return Below(n) == n - 1; }  // the zeros of an exhausted source are no

 private:
  uint64_t state_ = 0;
  const bool random_ = false;
  uint64_t word_ = 0;
  int left_ = 0;
  absl::Span<const uint8_t> bytes_;
  size_t next_ = 0;
};

}  // namespace attnd

#endif  // ATTND_TESTS_UNIT_ENGINE_MODEL_CHOICES_H_

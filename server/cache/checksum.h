// XXH3 with 64 bits, by the widest vectors that the CPU has: at the speed of a copy, where the baseline's are half
// that.
#ifndef ATTND_SERVER_CACHE_CHECKSUM_H_
#define ATTND_SERVER_CACHE_CHECKSUM_H_

#include <cstddef>
#include <cstdint>
#include <memory>

struct XXH3_state_s;

namespace attnd {

uint64_t Checksum(const void* data, size_t bytes, uint64_t seed);

// The same of bytes that come in parts.
class ChecksumStream {
 public:
  ChecksumStream();
  void Start(uint64_t seed);
  void Add(const void* data, size_t bytes);
  uint64_t Result() const;

 private:
  struct Delete {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Delete> state_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_CACHE_CHECKSUM_H_

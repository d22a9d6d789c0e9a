// Memory aligned to a cache line, zeroed when it is allocated.
#ifndef ATTND_KERNELS_ALIGNED_BUFFER_H_
#define ATTND_KERNELS_ALIGNED_BUFFER_H_

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace attnd {

class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(size_t bytes) { Reserve(bytes); }

  // Grows to at least `bytes`; the contents are lost when it does.
  void Reserve(size_t bytes) {
    if (bytes <= bytes_) return;
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(kAlignment, bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_.get(), 0, bytes);
    bytes_ = bytes;
  }

  template <class T>
  T* As() const {
    return reinterpret_cast<T*>(data_.get());
  }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kAlignment = 64;
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t bytes_ = 0;
};

}  // namespace attnd

#endif  // ATTND_KERNELS_ALIGNED_BUFFER_H_

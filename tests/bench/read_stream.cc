// The plainest reading of memory: whole vectors, four independent sums, nothing but what the hardware prefetches.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/bench/read_stream.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "hwy/highway.h"
#include "tests/bench/read_stream.h"

HWY_BEFORE_NAMESPACE();
namespace attnd::bench {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

uint64_t SumWords(const uint64_t* words, size_t count) {
  const hn::ScalableTag<uint64_t> d;
  const size_t lanes = hn::Lanes(d);
  auto s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  for (size_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    s0 = hn::Add(s0, hn::Load(d, words + i));
    s1 = hn::Add(s1, hn::Load(d, words + i + lanes));
    s2 = hn::Add(s2, hn::Load(d, words + i + 2 * lanes));
    s3 = hn::Add(s3, hn::Load(d, words + i + 3 * lanes));
  }
  return hn::ReduceSum(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3)));
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd::bench
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd::bench {

HWY_EXPORT(SumWords);

uint64_t ReadWords(const std::byte* data, size_t bytes) {
  return HWY_DYNAMIC_DISPATCH(SumWords)(reinterpret_cast<const uint64_t*>(data), bytes / sizeof(uint64_t));
}

void ReadStream(Pool* pool, const std::byte* data, size_t bytes) {
  // Parts small enough that the threads end together, large enough for the prefetchers.
  constexpr size_t kMinPart = size_t{8} << 10, kMaxPart = size_t{256} << 10;
  const size_t share = bytes / (8 * static_cast<size_t>(pool->threads())) / kMinPart * kMinPart;
  const size_t part_bytes = std::clamp(share, kMinPart, kMaxPart);
  static std::atomic<uint64_t> sink;
  pool->Run(static_cast<int>((bytes + part_bytes - 1) / part_bytes), [&](int part, int) {
    const size_t first = part * part_bytes;
    sink.fetch_add(ReadWords(data + first, std::min(part_bytes, bytes - first)), std::memory_order_relaxed);
  });
}

}  // namespace attnd::bench
#endif  // HWY_ONCE

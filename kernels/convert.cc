#include "kernels/convert.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/convert.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "hwy/highway.h"
#include "kernels/bf16-inl.h"
#include "kernels/isa.h"
#include "kernels/row_vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

template <DType kFrom>
HWY_INLINE void Widen(const std::byte* from, size_t count, float* to) {
  const hn::ScalableTag<float> d;
  ForVectors(hn::Lanes(d), count,
             [&](size_t i, size_t n) ATTND_STEP { hn::StoreN(LoadAsF32<kFrom>(d, from, i, n), d, to + i, n); });
}

void WidenBf16(const std::byte* from, size_t count, float* to) { Widen<DType::kBf16>(from, count, to); }
void WidenF16(const std::byte* from, size_t count, float* to) { Widen<DType::kF16>(from, count, to); }

void NarrowBf16(const std::byte* from, size_t count, std::byte* to) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  ForVectors(hn::Lanes(d), count, [&](size_t i, size_t n) ATTND_STEP {
    const auto bits = RoundAnyBitsToBf16(du, hn::BitCast(du, LoadBytes(d, from + i * sizeof(float), n)));
    StoreBytes(d16, hn::TruncateTo(d16, hn::ShiftRight<16>(bits)), to + 2 * i, n);
  });
}

void NarrowF16(const float* from, size_t count, std::byte* to) {
  const hn::ScalableTag<float> d;
  const hn::Rebind<uint16_t, decltype(d)> d16;
  const hn::Rebind<hwy::float16_t, decltype(d)> df16;
  ForVectors(hn::Lanes(d), count, [&](size_t i, size_t n) ATTND_STEP {
    const auto half = hn::DemoteTo(df16, hn::LoadN(d, from + i, n));
    StoreBytes(d16, hn::BitCast(d16, half), to + 2 * i, n);
  });
}

void WidenPairsImpl(const uint16_t* from, size_t pairs, size_t columns, float* to) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  for (size_t p = 0; p < pairs; ++p, from += 2 * columns, to += 2 * columns) {
    const uint32_t* row = reinterpret_cast<const uint32_t*>(from);
    ForVectors(hn::Lanes(d), columns, [&](size_t i, size_t n) ATTND_STEP {
      const auto pair = hn::LoadN(du, row + i, n);
      hn::StoreN(hn::BitCast(d, hn::ShiftLeft<16>(pair)), d, to + i, n);
      hn::StoreN(hn::BitCast(d, hn::And(pair, hn::Set(du, 0xFFFF0000u))), d, to + columns + i, n);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {
namespace {

HWY_EXPORT(WidenBf16);
HWY_EXPORT(WidenF16);
HWY_EXPORT(NarrowBf16);
HWY_EXPORT(NarrowF16);
HWY_EXPORT(WidenPairsImpl);

}  // namespace

void WidenRow(const std::byte* from, DType dtype, int count, float* to) {
  if (count <= 0) return;
  InitIsa();
  switch (dtype) {
    case DType::kF32:
      std::memcpy(to, from, sizeof(float) * count);
      break;
    case DType::kBf16:
      HWY_DYNAMIC_DISPATCH(WidenBf16)(from, count, to);
      break;
    case DType::kF16:
      HWY_DYNAMIC_DISPATCH(WidenF16)(from, count, to);
      break;
  }
}

void NarrowRow(const float* from, int count, DType dtype, std::byte* to) {
  if (count <= 0) return;
  InitIsa();
  switch (dtype) {
    case DType::kF32:
      std::memcpy(to, from, sizeof(float) * count);
      break;
    case DType::kBf16:
      HWY_DYNAMIC_DISPATCH(NarrowBf16)(reinterpret_cast<const std::byte*>(from), count, to);
      break;
    case DType::kF16:
      HWY_DYNAMIC_DISPATCH(NarrowF16)(from, count, to);
      break;
  }
}

void RoundRowToBf16(const float* from, int count, uint16_t* to) {
  InitIsa();
  HWY_DYNAMIC_DISPATCH(NarrowBf16)
  (reinterpret_cast<const std::byte*>(from), count, reinterpret_cast<std::byte*>(to));
}

void RowToBf16(const std::byte* from, DType dtype, int count, uint16_t* to) {
  if (dtype == DType::kBf16) {
    std::memcpy(to, from, sizeof(uint16_t) * count);
    return;
  }
  if (dtype == DType::kF32) {
    InitIsa();
    HWY_DYNAMIC_DISPATCH(NarrowBf16)(from, count, reinterpret_cast<std::byte*>(to));
    return;
  }
  HWY_ALIGN float wide[kMaxHeadDim];
  for (int done = 0; done < count; done += kMaxHeadDim) {
    const int n = count - done < kMaxHeadDim ? count - done : kMaxHeadDim;
    WidenRow(from + done * DTypeBytes(dtype), dtype, n, wide);
    RoundRowToBf16(wide, n, to + done);
  }
}

void WidenPairs(const uint16_t* from, int pairs, int columns, float* to) {
  InitIsa();
  HWY_DYNAMIC_DISPATCH(WidenPairsImpl)(from, pairs, columns, to);
}

}  // namespace attnd
#endif  // HWY_ONCE

#include "kernels/streaming.h"

#include "kernels/amx_stream.h"
#include "kernels/block_layout.h"
#include "kernels/isa.h"
#include "kernels/prefetch.h"
#include "kernels/unroll.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/streaming.cc"
#include "hwy/foreach_target.h"  // must come before highway.h

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace attnd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using DF = hn::ScalableTag<float>;
using DU = hn::ScalableTag<uint32_t>;
using DI = hn::ScalableTag<int32_t>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;

constexpr size_t kLanes = hn::MaxLanes(DF());
// Rows and vectors of a register tile. AVX-512 has 32 registers: 4 x 4 accumulators leave room for B and A. The others
// have 16: 4 x 2. kTiles keeps three sums per output, so 4 x 2 there too.
constexpr int kTileRows = 4;
constexpr int kTileVectors = kLanes >= 16 ? 4 : 2;
constexpr int kTilesVectors = 2;
constexpr int kTileChunkSteps = 16;  // pairs of one tdpbf16ps

// To L2: L1 is too small to hold what lies 16 KB ahead beside the operands, and NTA measured worse than none.
template <StreamMode kMode, bool kPrefetch>
HWY_INLINE void PrefetchStep(int step, const std::byte* const* ahead) {
  if constexpr (kPrefetch) {
    constexpr int kSteps = PrefetchSteps(kMode), kStepBytes = kPrefetchBytes / kSteps;
    const std::byte* p = ahead[step / kSteps] + (step % kSteps) * kStepBytes;
    PrefetchToL2(p, kStepBytes);
  }
  (void)step, (void)ahead;
}

// `n` units of B, the lanes behind them zero.
template <StreamMode kMode, bool kPartial>
HWY_INLINE VF LoadB(const std::byte* b, size_t n) {
  const DF d;
  if constexpr (kMode == StreamMode::kF16) {
    const hn::Rebind<uint16_t, DF> d16;
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(b);
    const auto bits = kPartial ? hn::LoadN(d16, halves, n) : hn::LoadU(d16, halves);
    return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), bits));
  }
  const float* p = reinterpret_cast<const float*>(b);
  if constexpr (kPartial) return hn::LoadN(d, p, n);
  (void)n;
  return hn::LoadU(d, p);
}

template <class T>
HWY_INLINE T LoadA(const std::byte* a, int index) {
  T value;
  __builtin_memcpy(&value, a + index * sizeof(T), sizeof(T));
  return value;
}

// One step into the sums of a row: A's element (or pair) `index` times the row b of B.
template <StreamMode kMode>
HWY_INLINE void Accumulate(const std::byte* a, int index, VF b, VF& sum) {
  const DF d;
  const DU du;
  if constexpr (kMode == StreamMode::kF32 || kMode == StreamMode::kF16) {
    sum = hn::MulAdd(hn::Set(d, LoadA<float>(a, index)), b, sum);
  } else if constexpr (kMode == StreamMode::kWidened) {
    const auto bits = hn::BitCast(du, b);
    const VF even = hn::BitCast(d, hn::ShiftLeft<16>(bits));
    const VF odd = hn::BitCast(d, hn::And(bits, hn::Set(du, 0xFFFF0000u)));
    sum = hn::MulAdd(hn::Set(d, LoadA<float>(a, 2 * index)), even, sum);
    sum = hn::MulAdd(hn::Set(d, LoadA<float>(a, 2 * index + 1)), odd, sum);
  } else {
#if HWY_NATIVE_DOT_BF16
    const hn::Repartition<hwy::bfloat16_t, DF> dbf;
    VF unused = hn::Zero(d);
    sum = hn::ReorderWidenMulAccumulate(d, hn::BitCast(dbf, hn::Set(du, LoadA<uint32_t>(a, index))),
                                        hn::BitCast(dbf, b), sum, unused);
#endif
  }
}

template <int kRows, int kVectors>
HWY_INLINE void SetZero(VF (&sums)[kRows][kVectors]) {
  ATTND_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ATTND_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Zero(DF());
  }
}

template <bool kPartial, int kRows, int kVectors>
HWY_INLINE void StoreSums(const StreamArgs& args, int row, int column, size_t last, VF (&sums)[kRows][kVectors]) {
  const DF d;
  ATTND_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ATTND_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      float* c = args.c + (row + r) * args.c_ld + column + v * kLanes;
      if (kPartial) {
        hn::StoreN(sums[r][v], d, c, last);
      } else {
        hn::StoreU(sums[r][v], d, c);
      }
    }
  }
}

// kRows x kVectors outputs from column `column` on, the last vector of `last` lanes if partial.
template <StreamMode kMode, int kRows, int kVectors, bool kPartial, bool kPrefetch>
HWY_NOINLINE void StreamTile(const StreamArgs& args, int row, int column, size_t last) {
  VF sums[kRows][kVectors];
  SetZero(sums);
  const std::byte* const* ahead = args.ahead;
  constexpr size_t kUnit = StreamUnitBytes(kMode);
  const size_t step_bytes = args.columns * kUnit;
  for (int piece = 0; piece < args.pieces; ++piece) {
    const std::byte* b = args.b[piece] + column * kUnit;
    const std::byte* a = args.a + row * args.a_row_bytes + piece * args.a_piece_bytes;
    for (int step = 0; step < args.steps; ++step, b += step_bytes) {
      PrefetchStep<kMode, kPrefetch>(step, ahead);
      VF bs[kVectors];
      ATTND_UNROLL
      for (int v = 0; v < kVectors; ++v) bs[v] = LoadB<kMode, kPartial>(b + v * kLanes * kUnit, last);
      ATTND_UNROLL
      for (int r = 0; r < kRows; ++r) {
        ATTND_UNROLL
        for (int v = 0; v < kVectors; ++v) Accumulate<kMode>(a + r * args.a_row_bytes, step, bs[v], sums[r][v]);
      }
    }
    if constexpr (kPrefetch) ahead += (args.steps + PrefetchSteps(kMode) - 1) / PrefetchSteps(kMode);
  }
  StoreSums<kPartial>(args, row, column, last, sums);
}

// The same with AMX's order of sums: within a chunk of 16 pairs the even and the odd elements are summed apart, each
// from zero; then even + odd joins the output.
template <int kRows, int kVectors, bool kPartial, bool kPrefetch>
HWY_NOINLINE void StreamTileAsAmx(const StreamArgs& args, int row, int column, size_t last) {
  constexpr StreamMode kMode = StreamMode::kTiles;
  const DF d;
  const DU du;
  VF sums[kRows][kVectors];
  SetZero(sums);
  const auto high = hn::Set(du, 0xFFFF0000u);
  const std::byte* const* ahead = args.ahead;
  const size_t step_bytes = args.columns * sizeof(float);
  for (int piece = 0; piece < args.pieces; ++piece) {
    const std::byte* b = args.b[piece] + column * sizeof(float);
    const std::byte* a = args.a + row * args.a_row_bytes + piece * args.a_piece_bytes;
    for (int step = 0; step < args.steps;) {
      const int chunk_end = step + kTileChunkSteps < args.steps ? step + kTileChunkSteps : args.steps;
      VF evens[kRows][kVectors], odds[kRows][kVectors];
      SetZero(evens);
      SetZero(odds);
      for (; step < chunk_end; ++step, b += step_bytes) {
        PrefetchStep<kMode, kPrefetch>(step, ahead);
        VF even[kVectors], odd[kVectors];
        ATTND_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          const auto bits = hn::BitCast(du, LoadB<kMode, kPartial>(b + v * kLanes * sizeof(float), last));
          even[v] = hn::BitCast(d, hn::ShiftLeft<16>(bits));
          odd[v] = hn::BitCast(d, hn::And(bits, high));
        }
        ATTND_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const VF a_even = hn::Set(d, LoadA<float>(a + r * args.a_row_bytes, 2 * step));
          const VF a_odd = hn::Set(d, LoadA<float>(a + r * args.a_row_bytes, 2 * step + 1));
          ATTND_UNROLL
          for (int v = 0; v < kVectors; ++v) {
            evens[r][v] = hn::MulAdd(a_even, even[v], evens[r][v]);
            odds[r][v] = hn::MulAdd(a_odd, odd[v], odds[r][v]);
          }
        }
      }
      ATTND_UNROLL
      for (int r = 0; r < kRows; ++r) {
        ATTND_UNROLL
        for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Add(sums[r][v], hn::Add(evens[r][v], odds[r][v]));
      }
    }
    if constexpr (kPrefetch) ahead += (args.steps + PrefetchSteps(kMode) - 1) / PrefetchSteps(kMode);
  }
  StoreSums<kPartial>(args, row, column, last, sums);
}

// Quads of s8 with rows of s16. The even and the odd bytes of a vector of B become pairs of s16 by shifts; A has its
// quads in the order 0 2 1 3 for that.
template <int kRows, int kVectors, bool kPartial, bool kPrefetch>
HWY_NOINLINE void StreamTileInt8(const StreamArgs& args, int row, int column, size_t last) {
  constexpr StreamMode kMode = StreamMode::kInt8;
  const DF d;
  const DI di;
  const hn::Repartition<int16_t, DI> d16;
  VI sums[kRows][kVectors];
  ATTND_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ATTND_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::Zero(di);
  }
  const std::byte* const* ahead = args.ahead;
  const size_t step_bytes = args.columns * sizeof(int32_t);
  for (int piece = 0; piece < args.pieces; ++piece) {
    const std::byte* b = args.b[piece] + column * sizeof(int32_t);
    const std::byte* a = args.a + row * args.a_row_bytes + piece * args.a_piece_bytes;
    for (int step = 0; step < args.steps; ++step, b += step_bytes) {
      PrefetchStep<kMode, kPrefetch>(step, ahead);
      hn::Vec<decltype(d16)> a_even[kRows], a_odd[kRows];
      ATTND_UNROLL
      for (int r = 0; r < kRows; ++r) {
        a_even[r] = hn::BitCast(d16, hn::Set(di, LoadA<int32_t>(a + r * args.a_row_bytes, 2 * step)));
        a_odd[r] = hn::BitCast(d16, hn::Set(di, LoadA<int32_t>(a + r * args.a_row_bytes, 2 * step + 1)));
      }
      ATTND_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const auto bytes = hn::BitCast(d16, LoadB<kMode, kPartial>(b + v * kLanes * sizeof(int32_t), last));
        const auto even = hn::ShiftRight<8>(hn::ShiftLeft<8>(bytes)), odd = hn::ShiftRight<8>(bytes);
        VI unused = hn::Zero(di);
        ATTND_UNROLL
        for (int r = 0; r < kRows; ++r) {
          sums[r][v] = hn::ReorderWidenMulAccumulate(di, a_even[r], even, sums[r][v], unused);
          sums[r][v] = hn::ReorderWidenMulAccumulate(di, a_odd[r], odd, sums[r][v], unused);
        }
      }
    }
    if constexpr (kPrefetch) ahead += (args.steps + PrefetchSteps(kMode) - 1) / PrefetchSteps(kMode);
  }
  // The scales first: a sum of large products would overflow before the scale of the other side could bring it down.
  VF scaled[kRows][kVectors];
  ATTND_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ATTND_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      VF scale = hn::Set(d, args.row_scales[row + r]);
      if (args.column_scales != nullptr) {
        const std::byte* scales = reinterpret_cast<const std::byte*>(args.column_scales + column + v * kLanes);
        scale = hn::Mul(scale, LoadB<kMode, kPartial>(scales, last));
      }
      scaled[r][v] = hn::Mul(hn::ConvertTo(d, sums[r][v]), scale);
    }
  }
  StoreSums<kPartial>(args, row, column, last, scaled);
}

void JoinHalvesImpl(const int32_t* sums, const StreamArgs& args, int row, int rows) {
  const DF d;
  const DI di;
  for (int r = row; r < row + rows; ++r, sums += 2 * kBlockTokens) {
    for (int column = 0; column < args.columns; column += static_cast<int>(kLanes)) {
      const VI high = hn::LoadU(di, sums + column), low = hn::LoadU(di, sums + kBlockTokens + column);
      VF scale = hn::Set(d, args.row_scales[r]);
      if (args.column_scales != nullptr) scale = hn::Mul(scale, hn::LoadU(d, args.column_scales + column));
      const VI sum = hn::Add(hn::ShiftLeft<8>(high), low);
      hn::StoreU(hn::Mul(hn::ConvertTo(d, sum), scale), d, args.c + r * args.c_ld + column);
    }
  }
}

template <StreamMode kMode, int kRows, int kVectors, bool kPartial, bool kPrefetch>
HWY_INLINE void Tile(const StreamArgs& args, int row, int column, size_t last) {
  if constexpr (kMode == StreamMode::kTiles) {
    StreamTileAsAmx<kRows, kVectors, kPartial, kPrefetch>(args, row, column, last);
  } else if constexpr (kMode == StreamMode::kInt8) {
    StreamTileInt8<kRows, kVectors, kPartial, kPrefetch>(args, row, column, last);
  } else {
    StreamTile<kMode, kRows, kVectors, kPartial, kPrefetch>(args, row, column, last);
  }
}

// kRows rows, all columns. Only the first pass over B prefetches: the others find it in L1 or L2.
template <StreamMode kMode, int kRows>
HWY_INLINE void StreamRows(const StreamArgs& args, int row, bool prefetch) {
  constexpr int kVectors = kMode == StreamMode::kTiles ? kTilesVectors : kTileVectors;
  constexpr int kColumns = kVectors * static_cast<int>(kLanes);
  int column = 0;
  for (; column + kColumns <= args.columns; column += kColumns) {
    if (prefetch) {
      Tile<kMode, kRows, kVectors, false, true>(args, row, column, kLanes);
      prefetch = false;
    } else {
      Tile<kMode, kRows, kVectors, false, false>(args, row, column, kLanes);
    }
  }
  for (; column < args.columns; column += static_cast<int>(kLanes)) {
    const size_t rest = args.columns - column;
    if (rest >= kLanes) {
      Tile<kMode, kRows, 1, false, false>(args, row, column, kLanes);
    } else {
      Tile<kMode, kRows, 1, true, false>(args, row, column, rest);
    }
  }
}

template <StreamMode kMode>
void Stream(const StreamArgs& args) {
  bool prefetch = args.ahead != nullptr;
  int row = 0;
  for (; row + kTileRows <= args.rows; row += kTileRows, prefetch = false) {
    StreamRows<kMode, kTileRows>(args, row, prefetch);
  }
  switch (args.rows - row) {
    case 3:
      return StreamRows<kMode, 3>(args, row, prefetch);
    case 2:
      return StreamRows<kMode, 2>(args, row, prefetch);
    case 1:
      return StreamRows<kMode, 1>(args, row, prefetch);
    default:
      return;
  }
}

void StreamF32(const StreamArgs& args) { Stream<StreamMode::kF32>(args); }
void StreamF16(const StreamArgs& args) { Stream<StreamMode::kF16>(args); }
void StreamInt8(const StreamArgs& args) { Stream<StreamMode::kInt8>(args); }
void StreamWidened(const StreamArgs& args) { Stream<StreamMode::kWidened>(args); }
void StreamTiles(const StreamArgs& args) { Stream<StreamMode::kTiles>(args); }
#if HWY_NATIVE_DOT_BF16
void StreamDotPairs(const StreamArgs& args) { Stream<StreamMode::kDotPairs>(args); }
bool HasDotPairs() { return true; }
#else
void StreamDotPairs(const StreamArgs&) {}
bool HasDotPairs() { return false; }
#endif
bool HasFma() { return HWY_NATIVE_FMA != 0; }

}  // namespace HWY_NAMESPACE
}  // namespace attnd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attnd {
namespace {

HWY_EXPORT(JoinHalvesImpl);
HWY_EXPORT(StreamF32);
HWY_EXPORT(StreamF16);
HWY_EXPORT(StreamInt8);
HWY_EXPORT(StreamWidened);
HWY_EXPORT(StreamTiles);
HWY_EXPORT(StreamDotPairs);
HWY_EXPORT(HasDotPairs);
HWY_EXPORT(HasFma);

}  // namespace

bool StreamModeAvailable(StreamMode mode) {
  InitIsa();
  switch (mode) {
    case StreamMode::kF32:
    case StreamMode::kF16:
    case StreamMode::kWidened:
    case StreamMode::kInt8:
      return true;
    case StreamMode::kDotPairs:
      return HWY_DYNAMIC_DISPATCH(HasDotPairs)();
    case StreamMode::kAmx:
    case StreamMode::kAmxInt8:
      return AmxStreamAvailable();
    case StreamMode::kTiles:
      return HWY_DYNAMIC_DISPATCH(HasFma)();
  }
  return false;
}

void JoinHalves(const int32_t* sums, const StreamArgs& args, int row, int rows) {
  InitIsa();
  HWY_DYNAMIC_DISPATCH(JoinHalvesImpl)(sums, args, row, rows);
}

void StreamProduct(StreamMode mode, const StreamArgs& args) {
  InitIsa();
  switch (mode) {
    case StreamMode::kF32:
      return HWY_DYNAMIC_DISPATCH(StreamF32)(args);
    case StreamMode::kF16:
      return HWY_DYNAMIC_DISPATCH(StreamF16)(args);
    case StreamMode::kInt8:
      return HWY_DYNAMIC_DISPATCH(StreamInt8)(args);
    case StreamMode::kWidened:
      return HWY_DYNAMIC_DISPATCH(StreamWidened)(args);
    case StreamMode::kDotPairs:
      return HWY_DYNAMIC_DISPATCH(StreamDotPairs)(args);
    case StreamMode::kTiles:
      return HWY_DYNAMIC_DISPATCH(StreamTiles)(args);
    case StreamMode::kAmx:
    case StreamMode::kAmxInt8:
      break;
  }
}

}  // namespace attnd
#endif  // HWY_ONCE

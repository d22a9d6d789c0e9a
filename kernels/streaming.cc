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

template <StreamMode kMode>
constexpr int kTileColumns = (kMode == StreamMode::kTiles ? kTilesVectors : kTileVectors) * static_cast<int>(kLanes);
// Register tiles that a row of B needs: passes over B. Where it takes one, all pieces follow each other in it. Where it
// takes more (4 on AVX2), the passes take turns over a part of B, and the sums wait in C meanwhile. A part is a piece
// of K, or as many of V as L1 holds.
template <StreamMode kMode>
constexpr int kPasses = (kBlockTokens + kTileColumns<kMode> - 1) / kTileColumns<kMode>;
constexpr int kPartBytes = 16384;

// What a step of a pass prefetches where one pass must do it all, and where the passes over a part share it, for the
// memory rests while a pass prefetches nothing. Decode from memory by AVX2 (Zen 3), with all of it in the first pass
// and shared: f32 0.43 and 0.65 of the read roof, bf16 0.43 and 0.73, f16 0.42 and 0.70, int8 0.36 and 0.52; a prefetch
// too many at once is dropped there.
template <StreamMode kMode>
constexpr int kStepBytes = kPrefetchBytes / PrefetchSteps(kMode);
template <StreamMode kMode>
constexpr int kPassBytes = kStepBytes<kMode> / kPasses<kMode>;
// Steps of a turn of the loop: a step of f16 in a shared pass prefetches half a line. What needs no more than one step
// for a line is slower with two in a turn.
template <StreamMode kMode>
constexpr int kUnroll = kPasses<kMode> > 1 && kMode == StreamMode::kF16 ? 2 : 1;

// Some pieces of a product.
struct Part : StreamArgs {
  explicit Part(const StreamArgs& args) : StreamArgs(args) {}

  unsigned first_step = 0;  // of this pass, among those that share the part's prefetches
  bool begins = true;       // sums begin at zero, not with what is in C
  bool ends = true;         // kInt8: C gets the scaled sums, not their bits
};

// From byte `at` of what the entries list on.
template <int kBytes>
HWY_INLINE void Prefetch(const std::byte* const* ahead, unsigned at) {
  if constexpr (kBytes > 0) {
    if (kBytes >= kCacheLine || at % kCacheLine == 0) {
      PrefetchToL2(ahead[at / kPrefetchBytes] + at % kPrefetchBytes, kBytes);
    }
  }
  (void)ahead, (void)at;
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

// Zeros, or what the pieces before this part left in C.
template <bool kPartial, int kRows, int kVectors>
HWY_INLINE void BeginSums(const Part& args, int row, int column, size_t last, VF (&sums)[kRows][kVectors]) {
  if (args.begins) return SetZero(sums);
  const DF d;
  ATTND_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ATTND_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const float* c = args.c + (row + r) * args.c_ld + column + v * kLanes;
      sums[r][v] = kPartial ? hn::LoadN(d, c, last) : hn::LoadU(d, c);
    }
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

template <StreamMode kMode, bool kPartial, int kRows, int kVectors>
HWY_INLINE void Step(const std::byte* b, const std::byte* a, size_t a_row_bytes, int step, size_t last,
                     VF (&sums)[kRows][kVectors]) {
  VF bs[kVectors];
  ATTND_UNROLL
  for (int v = 0; v < kVectors; ++v) bs[v] = LoadB<kMode, kPartial>(b + v * kLanes * StreamUnitBytes(kMode), last);
  ATTND_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ATTND_UNROLL
    for (int v = 0; v < kVectors; ++v) Accumulate<kMode>(a + r * a_row_bytes, step, bs[v], sums[r][v]);
  }
}

// Calls step(b, step) for the steps of a piece and prefetches beside them, kBytes a step from `at` on.
template <StreamMode kMode, int kBytes, class OneStep>
HWY_INLINE void ForSteps(const Part& args, const std::byte* b, unsigned at, const OneStep& step) {
  const size_t step_bytes = args.columns * StreamUnitBytes(kMode);
  int s = 0;
  for (; s + kUnroll<kMode> <= args.steps; s += kUnroll<kMode>, b += kUnroll<kMode> * step_bytes) {
    Prefetch<kUnroll<kMode> * kBytes>(args.ahead, at + s * kBytes);
    ATTND_UNROLL
    for (int u = 0; u < kUnroll<kMode>; ++u) step(b + u * step_bytes, s + u);
  }
  for (; s < args.steps; ++s, b += step_bytes) step(b, s);
}

// kRows x kVectors outputs from column `column` on, the last vector of `last` lanes if partial.
template <StreamMode kMode, int kRows, int kVectors, bool kPartial, int kBytes>
HWY_NOINLINE void StreamTile(const Part& args, int row, int column, size_t last) {
  VF sums[kRows][kVectors];
  BeginSums<kPartial>(args, row, column, last, sums);
  for (int piece = 0; piece < args.pieces; ++piece) {
    const std::byte* b = args.b[piece] + column * StreamUnitBytes(kMode);
    const std::byte* a = args.a + row * args.a_row_bytes + piece * args.a_piece_bytes;
    ForSteps<kMode, kBytes>(args, b, (args.first_step + piece * args.steps) * kBytes,
                            [&](const std::byte* b_step, int step)
                                HWY_ATTR { Step<kMode, kPartial>(b_step, a, args.a_row_bytes, step, last, sums); });
  }
  StoreSums<kPartial>(args, row, column, last, sums);
}

// The same with AMX's order of sums: within a chunk of 16 pairs the even and the odd elements are summed apart, each
// from zero; then even + odd joins the output.
template <int kRows, int kVectors, bool kPartial, int kBytes>
HWY_NOINLINE void StreamTileAsAmx(const Part& args, int row, int column, size_t last) {
  constexpr StreamMode kMode = StreamMode::kTiles;
  const DF d;
  const DU du;
  VF sums[kRows][kVectors];
  BeginSums<kPartial>(args, row, column, last, sums);
  const auto high = hn::Set(du, 0xFFFF0000u);
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
        Prefetch<kBytes>(args.ahead, (args.first_step + piece * args.steps + step) * kBytes);
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
  }
  StoreSums<kPartial>(args, row, column, last, sums);
}

// Quads of s8 with rows of s16. The even and the odd bytes of a vector of B become pairs of s16 by shifts; A has its
// quads in the order 0 2 1 3 for that.
template <bool kPartial, int kRows, int kVectors>
HWY_INLINE void StepInt8(const std::byte* b, const std::byte* a, size_t a_row_bytes, int step, size_t last,
                         VI (&sums)[kRows][kVectors]) {
  const DI di;
  const hn::Repartition<int16_t, DI> d16;
  // B stays in registers and A passes by: the other way round 16 registers would not do.
  hn::Vec<decltype(d16)> even[kVectors], odd[kVectors];
  ATTND_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    const auto bytes = hn::BitCast(d16, LoadB<StreamMode::kInt8, kPartial>(b + v * kLanes * sizeof(int32_t), last));
    even[v] = hn::ShiftRight<8>(hn::ShiftLeft<8>(bytes));
    odd[v] = hn::ShiftRight<8>(bytes);
  }
  ATTND_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const auto a_even = hn::BitCast(d16, hn::Set(di, LoadA<int32_t>(a + r * a_row_bytes, 2 * step)));
    const auto a_odd = hn::BitCast(d16, hn::Set(di, LoadA<int32_t>(a + r * a_row_bytes, 2 * step + 1)));
    VI unused = hn::Zero(di);
    ATTND_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = hn::ReorderWidenMulAccumulate(di, a_even, even[v], sums[r][v], unused);
      sums[r][v] = hn::ReorderWidenMulAccumulate(di, a_odd, odd[v], sums[r][v], unused);
    }
  }
}

template <int kRows, int kVectors, bool kPartial, int kBytes>
HWY_NOINLINE void StreamTileInt8(const Part& args, int row, int column, size_t last) {
  constexpr StreamMode kMode = StreamMode::kInt8;
  const DF d;
  const DI di;
  VF bits[kRows][kVectors];
  BeginSums<kPartial>(args, row, column, last, bits);
  VI sums[kRows][kVectors];
  ATTND_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ATTND_UNROLL
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::BitCast(di, bits[r][v]);
  }
  for (int piece = 0; piece < args.pieces; ++piece) {
    const std::byte* b = args.b[piece] + column * sizeof(int32_t);
    const std::byte* a = args.a + row * args.a_row_bytes + piece * args.a_piece_bytes;
    ForSteps<kMode, kBytes>(args, b, (args.first_step + piece * args.steps) * kBytes,
                            [&](const std::byte* b_step, int step)
                                HWY_ATTR { StepInt8<kPartial>(b_step, a, args.a_row_bytes, step, last, sums); });
  }
  if (!args.ends) {
    ATTND_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ATTND_UNROLL
      for (int v = 0; v < kVectors; ++v) bits[r][v] = hn::BitCast(d, sums[r][v]);
    }
    return StoreSums<kPartial>(args, row, column, last, bits);
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

template <StreamMode kMode, int kRows, int kVectors, bool kPartial, int kBytes>
HWY_INLINE void Tile(const Part& args, int row, int column, size_t last) {
  if constexpr (kMode == StreamMode::kTiles) {
    StreamTileAsAmx<kRows, kVectors, kPartial, kBytes>(args, row, column, last);
  } else if constexpr (kMode == StreamMode::kInt8) {
    StreamTileInt8<kRows, kVectors, kPartial, kBytes>(args, row, column, last);
  } else {
    StreamTile<kMode, kRows, kVectors, kPartial, kBytes>(args, row, column, last);
  }
}

// kRows rows, all columns. Only the first rows' passes over B prefetch: the others find it in L1 or L2.
template <StreamMode kMode, int kRows>
HWY_INLINE void StreamRows(Part args, int row, bool prefetch) {
  constexpr int kColumns = kTileColumns<kMode>, kVectors = kColumns / static_cast<int>(kLanes);
  // A narrower panel has fewer passes: all its prefetches are in the first.
  const bool shared = kPasses<kMode> > 1 && args.columns == kBlockTokens;
  int column = 0;
  for (; column + kColumns <= args.columns; column += kColumns, args.first_step += args.pieces * args.steps) {
    if (!prefetch) {
      Tile<kMode, kRows, kVectors, false, 0>(args, row, column, kLanes);
    } else if (shared) {
      Tile<kMode, kRows, kVectors, false, kPassBytes<kMode>>(args, row, column, kLanes);
    } else {
      Tile<kMode, kRows, kVectors, false, kStepBytes<kMode>>(args, row, column, kLanes);
      prefetch = false;
    }
  }
  for (; column < args.columns; column += static_cast<int>(kLanes)) {
    const size_t rest = args.columns - column;
    if (rest >= kLanes) {
      Tile<kMode, kRows, 1, false, 0>(args, row, column, kLanes);
    } else {
      Tile<kMode, kRows, 1, true, 0>(args, row, column, rest);
    }
  }
}

template <StreamMode kMode>
HWY_INLINE void StreamPart(const Part& args) {
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

template <StreamMode kMode>
void Stream(const StreamArgs& args) {
  Part part(args);
  if (kPasses<kMode> == 1) return StreamPart<kMode>(part);
  const int piece_bytes = args.steps * args.columns * static_cast<int>(StreamUnitBytes(kMode));
  const int piece_entries = (args.steps + PrefetchSteps(kMode) - 1) / PrefetchSteps(kMode);
  const int pieces = HWY_MAX(1, kPartBytes / piece_bytes);
  for (int piece = 0; piece < args.pieces; piece += pieces) {
    part.pieces = HWY_MIN(pieces, args.pieces - piece);
    part.begins = piece == 0;
    part.ends = piece + part.pieces == args.pieces;
    part.a = args.a + piece * args.a_piece_bytes;
    part.b = args.b + piece;
    if (args.ahead != nullptr) part.ahead = args.ahead + piece * piece_entries;
    StreamPart<kMode>(part);
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
bool PassesShare() { return kPasses<StreamMode::kF32> > 1; }

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
HWY_EXPORT(PassesShare);

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

int StreamAheadBytes() {
  InitIsa();
  return HWY_DYNAMIC_DISPATCH(PassesShare)() ? 24576 : 16384;
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

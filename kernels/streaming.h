// Products of few rows with blocks, for decode (INT8: of any number of rows): a plain loop with one accumulator per
// output and k in order, which prefetches to L2 along the block list while it multiplies. From memory it is about twice
// as fast as the ukernel, whose opaque call leaves the hardware prefetchers alone, and on the same operands it gives
// the same bits.
#ifndef ATTND_KERNELS_STREAMING_H_
#define ATTND_KERNELS_STREAMING_H_

#include <cstddef>
#include <cstdint>

namespace attnd {

// How a step of B (a row of f32, of f16, of bf16 pairs or of int8 quads) is multiplied. Each is the order of sums of a
// ukernel, but for kInt8, whose sums are exact.
enum class StreamMode : uint8_t {
  kF32,       // A f32, B f32: one FMA
  kF16,       // A f32, B f16: one FMA, as if B had been widened to f32 before
  kWidened,   // A f32, B bf16 pairs: two FMAs, as if B had been widened to f32 before
  kDotPairs,  // A bf16, B bf16 pairs: vdpbf16ps (AVX512_BF16)
  kAmx,       // A bf16, B bf16 pairs: AMX's tdpbf16ps (amx_stream.h), for whole tiles of B
  kTiles,     // A f32 of bf16 values, B bf16 pairs: as tdpbf16ps; even and odd elements apart in chunks of 32
  kInt8,      // A s16 (S16Form::kQuads), B s8 quads: sums in s32, then the scales
  kAmxInt8,   // the same by AMX's tdpbssd, A in halves: its row of lo follows a_row_bytes behind its row of hi
};

constexpr size_t StreamUnitBytes(StreamMode mode) { return mode == StreamMode::kF16 ? 2 : 4; }

// Where to prefetch next: one pointer per kPrefetchBytes of the stream that the caller is going to read. A product
// consumes one per PrefetchSteps steps of a piece (rounded up; of several pieces the steps are a multiple).
inline constexpr int kPrefetchBytes = 2048;  // how far ahead: StreamAheadBytes
inline constexpr int kMinPrefetchSteps = 8;
constexpr int PrefetchSteps(StreamMode mode) { return kMinPrefetchSteps * 4 / static_cast<int>(StreamUnitBytes(mode)); }

// c[row][column] = sum over pieces and k of a[row][piece][k] * b[piece][k][column], from zero, in this order.
struct StreamArgs {
  const std::byte* a = nullptr;  // row r of piece p is at a + r * a_row_bytes + p * a_piece_bytes
  size_t a_row_bytes = 0;        // kAmxInt8: twice this from row to row
  size_t a_piece_bytes = 0;
  int rows = 0;
  const std::byte* const* b = nullptr;  // [pieces] -> [steps][columns] of StreamUnitBytes
  int pieces = 0;
  int steps = 0;
  int columns = 0;     // 1..64
  float* c = nullptr;  // holds what is summed up so far, or its bits, while the product is computed
  size_t c_ld = 0;
  const std::byte* const* ahead = nullptr;  // or null: no prefetch
  // kInt8, kAmxInt8: c is multiplied by row_scales[row] and, unless null, column_scales[column].
  const float* row_scales = nullptr;
  const float* column_scales = nullptr;
};

// True where this process has what the mode needs (kDotPairs: AVX512_BF16; kAmx, kAmxInt8: AMX).
bool StreamModeAvailable(StreamMode mode);

// How far ahead of what they multiply these products had best prefetch, measured from memory. Emerald Rapids: 8 and 32
// KB cost 5 %. Zen 3, where four passes go over the same 16 KB: 16 and 32 KB cost 2 %.
int StreamAheadBytes();

// Not for kAmx and kAmxInt8, which need the thread's tiles configured: amx_stream.h.
void StreamProduct(StreamMode mode, const StreamArgs& args);

// The end of a product in halves: c = (256 * hi + lo) * scales for rows [row, row + rows), from `sums`, where rows of
// hi and lo alternate, 64 columns apart.
void JoinHalves(const int32_t* sums, const StreamArgs& args, int row, int rows);

}  // namespace attnd

#endif  // ATTND_KERNELS_STREAMING_H_

#include "kernels/amx_stream.h"

#include <cassert>

#include "kernels/isa.h"

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 11)
#define ATTND_HAVE_AMX 1
#include <immintrin.h>
#else
#define ATTND_HAVE_AMX 0
#endif

namespace attnd {

#if ATTND_HAVE_AMX
namespace {

#define ATTND_AMX __attribute__((target("amx-tile,amx-bf16")))

constexpr int kChunkSteps = 16;  // pairs of k in a tile
constexpr int kTileRows = 16;
constexpr int kTileColumns = 16;  // f32 of C, pairs of B
constexpr int kTileBytes = 64;    // of a tile's full row

// Tiles 0..3 are C, 4 is A, 5 is B; 6 and 7 are A and B of a last, shorter chunk of k, or else 7 is B of the last
// columns.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void Set(int tile, int tile_rows, int bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};
static_assert(sizeof(TileConfig) == 64);

TileConfig ConfigFor(const StreamArgs& args) {
  const int k_tail = args.steps % kChunkSteps, column_tail = args.columns % kTileColumns;
  TileConfig config;
  for (int j = 0; j < (args.columns + kTileColumns - 1) / kTileColumns; ++j) {
    const bool last = column_tail != 0 && j == args.columns / kTileColumns;
    config.Set(j, args.rows, last ? column_tail * 4 : kTileBytes);
  }
  config.Set(4, args.rows, kTileBytes);
  config.Set(5, kChunkSteps, kTileBytes);
  if (k_tail != 0) {
    config.Set(6, args.rows, k_tail * 4);
    config.Set(7, k_tail, kTileBytes);
  } else if (column_tail != 0) {
    config.Set(7, kChunkSteps, column_tail * 4);
  }
  return config;
}

// A quarter of what a whole chunk of 64 columns reads: 1 KB.
inline void PrefetchQuarter(const std::byte* const* ahead, int chunk, int quarter) {
  const std::byte* p = ahead[chunk * 2 + quarter / 2] + (quarter % 2) * (kPrefetchBytes / 2);
  for (int line = 0; line < kPrefetchBytes / 2; line += 64) __builtin_prefetch(p + line, 0, 2);
}

// One chunk into each group of columns, C_j += A x B_j, with tile numbers as constants.
#define ATTND_GROUP(c, a_tile, b_tile)                                      \
  do {                                                                      \
    if (ahead != nullptr) PrefetchQuarter(ahead, chunk, c);                 \
    _tile_loadd(b_tile, b + (c) * kTileBytes, static_cast<long>(b_stride)); \
    _tile_dpbf16ps(c, a_tile, b_tile);                                      \
  } while (false)

ATTND_AMX void WholeChunk(const std::byte* b, size_t b_stride, int columns, const std::byte* const* ahead, int chunk) {
  if (columns >= 16) ATTND_GROUP(0, 4, 5);
  if (columns >= 32) ATTND_GROUP(1, 4, 5);
  if (columns >= 48) ATTND_GROUP(2, 4, 5);
  if (columns >= 64) ATTND_GROUP(3, 4, 5);
  if (columns % kTileColumns == 0) return;
  switch (columns / kTileColumns) {
    case 0:
      ATTND_GROUP(0, 4, 7);
      break;
    case 1:
      ATTND_GROUP(1, 4, 7);
      break;
    case 2:
      ATTND_GROUP(2, 4, 7);
      break;
    default:
      ATTND_GROUP(3, 4, 7);
  }
}

ATTND_AMX void ShortChunk(const std::byte* b, size_t b_stride, int columns) {
  constexpr const std::byte* const* ahead = nullptr;
  constexpr int chunk = 0;
  if (columns >= 16) ATTND_GROUP(0, 6, 7);
  if (columns >= 32) ATTND_GROUP(1, 6, 7);
  if (columns >= 48) ATTND_GROUP(2, 6, 7);
  if (columns >= 64) ATTND_GROUP(3, 6, 7);
}

ATTND_AMX void StoreTiles(const StreamArgs& args) {
  const long stride = static_cast<long>(args.c_ld * sizeof(float));
  _tile_stored(0, args.c, stride);
  if (args.columns > 16) _tile_stored(1, args.c + 16, stride);
  if (args.columns > 32) _tile_stored(2, args.c + 32, stride);
  if (args.columns > 48) _tile_stored(3, args.c + 48, stride);
}

ATTND_AMX void Multiply(const StreamArgs& args) {
  const TileConfig config = ConfigFor(args);
  _tile_loadconfig(&config);
  _tile_zero(0);
  if (args.columns > 16) _tile_zero(1);
  if (args.columns > 32) _tile_zero(2);
  if (args.columns > 48) _tile_zero(3);
  const size_t b_stride = args.columns * 4, chunks = args.steps / kChunkSteps;
  const long a_stride = static_cast<long>(args.a_row_bytes);
  const std::byte* const* ahead = args.ahead;
  for (int piece = 0; piece < args.pieces; ++piece) {
    const std::byte* a = args.a + piece * args.a_piece_bytes;
    const std::byte* b = args.b[piece];
    for (size_t chunk = 0; chunk < chunks; ++chunk, a += kTileBytes, b += kChunkSteps * b_stride) {
      _tile_loadd(4, a, a_stride);
      WholeChunk(b, b_stride, args.columns, ahead, static_cast<int>(chunk));
    }
    if (args.steps % kChunkSteps != 0) {
      _tile_loadd(6, a, a_stride);
      ShortChunk(b, b_stride, args.columns);
    }
    if (ahead != nullptr) ahead += (args.steps + kPrefetchSteps - 1) / kPrefetchSteps;
  }
  StoreTiles(args);
  _tile_release();
}

}  // namespace

bool AmxStreamAvailable() { return OneDnnHasAmx(); }

void AmxStream(const StreamArgs& args) {
  assert(args.columns % kTileColumns == 0 || args.steps % kChunkSteps == 0);
  StreamArgs part = args;
  for (int row = 0; row < args.rows; row += kTileRows) {
    part.a = args.a + row * args.a_row_bytes;
    part.c = args.c + row * args.c_ld;
    part.rows = args.rows - row < kTileRows ? args.rows - row : kTileRows;
    Multiply(part);
    part.ahead = nullptr;  // only the first pass over B prefetches
  }
}

#else

bool AmxStreamAvailable() { return false; }
void AmxStream(const StreamArgs&) {}

#endif

}  // namespace attnd

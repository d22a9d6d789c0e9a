#include "kernels/amx_stream.h"

#include <algorithm>
#include <cassert>

#include "kernels/block_layout.h"
#include "kernels/isa.h"
#include "kernels/prefetch.h"

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 11)
#define ATTND_HAVE_AMX 1
#include <immintrin.h>
#else
#define ATTND_HAVE_AMX 0
#endif

namespace attnd {
namespace {

constexpr int TileRowsOf(StreamMode mode) { return mode == StreamMode::kAmxInt8 ? 2 : 1; }

// Rows of A in each of the fewest passes.
int PassTileRows(StreamMode mode, int rows) {
  const int per_row = TileRowsOf(mode), most = kAmxRows / per_row;
  const int passes = (rows + most - 1) / most;
  return (rows + passes - 1) / passes * per_row;
}

}  // namespace

int AmxPaddedRows(StreamMode mode, int rows) {
  const int pass_rows = PassTileRows(mode, rows) / TileRowsOf(mode);
  return (rows + pass_rows - 1) / pass_rows * pass_rows;
}

#if ATTND_HAVE_AMX
namespace {

#define ATTND_AMX __attribute__((target("amx-tile,amx-bf16,amx-int8")))

// Tiles 0..3 hold C, one for every 16 columns; 4 is A; 5, 6 and 7 are B in turn, so that a load need not wait for the
// product before it.
struct alignas(64) TileConfig {
  static constexpr int kTileBytes = 64;  // of a tile's row
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr TileConfig(int pass_rows) {
    for (int tile = 0; tile < 8; ++tile) {
      rows[tile] = static_cast<uint8_t>(tile < 5 ? pass_rows : kAmxChunkSteps);
      row_bytes[tile] = kTileBytes;
    }
  }
};
static_assert(sizeof(TileConfig) == 64);

// Not on the stack: GCC 12's _tile_loadconfig does not tell the optimizer that it reads all 64 bytes.
constexpr TileConfig kConfigs[kAmxRows] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

constexpr size_t kTileOfB = kAmxChunkSteps * TileConfig::kTileBytes;

// What a tile of B takes: 1 KB, to L1: to L2 costs 2 % from memory and 5 to 10 % in a cache. The two entries of a chunk
// follow each other, and so does what they name.
__attribute__((always_inline)) inline void PrefetchTile(const std::byte* const* ahead, int chunk, int group) {
  PrefetchToL1(ahead[chunk * 2] + group * kTileOfB, kTileOfB);
}
static_assert(PrefetchSteps(StreamMode::kAmx) * 2 == kAmxChunkSteps);

// C += A x B for 16 steps and 16 columns; tile numbers must be constants.
#define ATTND_AMX_GROUP(group, b_tile)                                                           \
  do {                                                                                           \
    if constexpr (kPrefetch) PrefetchTile(ahead, chunk, group);                                  \
    _tile_loadd(b_tile, b + (group) * TileConfig::kTileBytes, kGroups * TileConfig::kTileBytes); \
    if constexpr (kMode == StreamMode::kAmx) {                                                   \
      _tile_dpbf16ps(group, 4, b_tile);                                                          \
    } else {                                                                                     \
      _tile_dpbssd(group, 4, b_tile);                                                            \
    }                                                                                            \
  } while (false)

// One pass over B: a tile of rows and 16 * kGroups columns, to c with rows c_bytes apart.
template <StreamMode kMode, int kGroups, bool kPrefetch>
ATTND_AMX void Pass(const StreamArgs& args, const std::byte* rows, void* c, size_t c_bytes) {
  _tile_zero(0);
  if constexpr (kGroups > 1) _tile_zero(1);
  if constexpr (kGroups > 2) _tile_zero(2);
  if constexpr (kGroups > 3) _tile_zero(3);
  const int chunks = args.steps / kAmxChunkSteps;
  const std::byte* const* ahead = args.ahead;
  for (int piece = 0; piece < args.pieces; ++piece) {
    const std::byte* a = rows + piece * args.a_piece_bytes;
    const std::byte* b = args.b[piece];
    for (int chunk = 0; chunk < chunks; ++chunk) {
      _tile_loadd(4, a, args.a_row_bytes);
      ATTND_AMX_GROUP(0, 5);
      if constexpr (kGroups > 1) ATTND_AMX_GROUP(1, 6);
      if constexpr (kGroups > 2) ATTND_AMX_GROUP(2, 7);
      if constexpr (kGroups > 3) ATTND_AMX_GROUP(3, 5);
      a += TileConfig::kTileBytes;
      b += kAmxChunkSteps * kGroups * TileConfig::kTileBytes;
    }
    if constexpr (kPrefetch) ahead += 2 * chunks;
  }
  std::byte* to = static_cast<std::byte*>(c);
  _tile_stored(0, to, c_bytes);
  if constexpr (kGroups > 1) _tile_stored(1, to + TileConfig::kTileBytes, c_bytes);
  if constexpr (kGroups > 2) _tile_stored(2, to + 2 * TileConfig::kTileBytes, c_bytes);
  if constexpr (kGroups > 3) _tile_stored(3, to + 3 * TileConfig::kTileBytes, c_bytes);
}

template <StreamMode kMode, int kGroups>
void AllRows(const StreamArgs& args) {
  constexpr int kPerRow = TileRowsOf(kMode);
  const int pass_rows = PassTileRows(kMode, args.rows) / kPerRow;
  for (int row = 0; row < args.rows; row += pass_rows) {
    const std::byte* a = args.a + row * kPerRow * args.a_row_bytes;
    // Only the first pass prefetches: the others find B in L1 or L2.
    const auto pass = row == 0 && args.ahead != nullptr ? Pass<kMode, kGroups, true> : Pass<kMode, kGroups, false>;
    if constexpr (kMode == StreamMode::kAmx) {
      pass(args, a, args.c + row * args.c_ld, args.c_ld * sizeof(float));
    } else {
      alignas(64) int32_t sums[kAmxRows * kBlockTokens];
      pass(args, a, sums, kBlockTokens * sizeof(int32_t));
      JoinHalves(sums, args, row, std::min(pass_rows, args.rows - row));
    }
  }
}

template <StreamMode kMode>
void Product(const StreamArgs& args) {
  switch (args.columns / kAmxColumns) {
    case 1:
      return AllRows<kMode, 1>(args);
    case 2:
      return AllRows<kMode, 2>(args);
    case 3:
      return AllRows<kMode, 3>(args);
    default:
      return AllRows<kMode, 4>(args);
  }
}

}  // namespace

bool AmxStreamAvailable() { return OneDnnHasAmx(); }

const void* AmxConfig(StreamMode mode, int rows) { return &kConfigs[PassTileRows(mode, rows) - 1]; }

ATTND_AMX void AmxLoad(const void* config) { _tile_loadconfig(config); }

void AmxStreamProduct(StreamMode mode, const StreamArgs& args) {
  assert(args.steps % kAmxChunkSteps == 0 && args.columns % kAmxColumns == 0);
  mode == StreamMode::kAmx ? Product<StreamMode::kAmx>(args) : Product<StreamMode::kAmxInt8>(args);
}

#else

bool AmxStreamAvailable() { return false; }
const void* AmxConfig(StreamMode, int) { return nullptr; }
void AmxLoad(const void*) {}
void AmxStreamProduct(StreamMode, const StreamArgs&) {}

#endif

}  // namespace attnd

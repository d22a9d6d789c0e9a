#include "kernels/amx_pieces.h"

#include "kernels/amx_stream.h"

#if ATTND_HAVE_AMX
#include <immintrin.h>
#endif

namespace attnd {

#if ATTND_HAVE_AMX
namespace {

constexpr int kTileBytes = 64;  // of a tile's row
constexpr int kTileRows = 16;

ATTND_AMX inline void ZeroTiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Tiles 0..3 += A x B for 16 steps: 4 and 5 are A's rows, 6 and 7 B's columns.
ATTND_AMX inline void MultiplyTiles(const std::byte* a, size_t a_row_bytes, const std::byte* b, size_t b_row_bytes) {
  _tile_loadd(6, b, b_row_bytes);
  _tile_loadd(4, a, a_row_bytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, a + kTileRows * a_row_bytes, a_row_bytes);
  _tile_dpbf16ps(2, 5, 6);
  _tile_loadd(7, b + kTileBytes, b_row_bytes);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(3, 5, 7);
}

ATTND_AMX inline void StoreTiles(float* c, size_t ld) {
  _tile_stored(0, c, ld * sizeof(float));
  _tile_stored(1, c + kTileRows, ld * sizeof(float));
  _tile_stored(2, c + kTileRows * ld, ld * sizeof(float));
  _tile_stored(3, c + kTileRows * ld + kTileRows, ld * sizeof(float));
}

}  // namespace

ATTND_AMX void MultiplyPiece(const AmxScorePiece& piece) {
  constexpr size_t kRowBytes = kBlockTokens * sizeof(float);
  ZeroTiles();
  for (int step = 0; step < piece.steps; step += kAmxChunkSteps) {
    MultiplyTiles(piece.q + step * sizeof(float), piece.q_row_bytes, piece.k + step * kRowBytes, kRowBytes);
  }
  StoreTiles(piece.scores, piece.scores_ld);
}

ATTND_AMX void MultiplyPiece(const AmxValuePiece& piece) {
  if (piece.first) ZeroTiles();
  for (int block = 0; block < piece.blocks; ++block) {
    const std::byte* a = piece.weights + block * kBlockTokens * 2;
    const std::byte* b = piece.v[block];
    MultiplyTiles(a, piece.weights_row_bytes, b, piece.v_row_bytes);
    MultiplyTiles(a + kTileBytes, piece.weights_row_bytes, b + kAmxChunkSteps * piece.v_row_bytes, piece.v_row_bytes);
  }
  if (piece.last) StoreTiles(piece.values, piece.values_ld);
}

#else

void MultiplyPiece(const AmxScorePiece&) {}
void MultiplyPiece(const AmxValuePiece&) {}

#endif

}  // namespace attnd

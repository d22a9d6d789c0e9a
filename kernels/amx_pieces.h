// Products of 32 rows with bf16 blocks on AMX tiles, cut into pieces of some hundred cycles, so that other work can
// stand between them and run at the same time: see pipeline.h. The ukernel's instructions in the ukernel's order, so
// its bits.
#ifndef ATTND_KERNELS_AMX_PIECES_H_
#define ATTND_KERNELS_AMX_PIECES_H_

#include <cstddef>

#include "kernels/block_layout.h"

namespace attnd {

inline constexpr int kAmxPieceRows = 32;     // two tiles of A
inline constexpr int kAmxPieceColumns = 32;  // two tiles of B: half a block of K or a panel of V

// c[32 rows][32 columns] = A x B. REQUIRES of both: the thread holds AmxConfig(16) (amx_stream.h).
struct AmxScorePiece {
  const std::byte* q = nullptr;  // bf16 [32][...]
  size_t q_row_bytes = 0;
  const std::byte* k = nullptr;  // bf16 pairs [steps][64 tokens], from the first of the 32 tokens on
  int steps = 0;                 // pairs of head_dim, a multiple of 16
  float* scores = nullptr;
  size_t scores_ld = 0;
};
void MultiplyPiece(const AmxScorePiece& piece);

// A part of the sum over a run's blocks: pieces of one sum follow each other, with no other piece between.
struct AmxValuePiece {
  const std::byte* weights = nullptr;  // bf16 [32][...], from the first block's first token on
  size_t weights_row_bytes = 0;
  const std::byte* v[kRunBlocks];  // bf16 pairs [32][width], from the first of the 32 columns on
  size_t v_row_bytes = 0;          // width pairs
  int blocks = 0;
  bool first = false;  // starts from zero
  bool last = false;   // stores
  float* values = nullptr;
  size_t values_ld = 0;
};
void MultiplyPiece(const AmxValuePiece& piece);

}  // namespace attnd

#endif  // ATTND_KERNELS_AMX_PIECES_H_

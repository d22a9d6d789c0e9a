// Products of few rows with bf16 blocks on AMX tiles, for decode: the ukernel's instructions in the ukernel's order, so
// its bits, but with the prefetch of the block list between the tiles, where an opaque call cannot have it.
#ifndef ATTND_KERNELS_AMX_STREAM_H_
#define ATTND_KERNELS_AMX_STREAM_H_

#include "kernels/streaming.h"

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 11)
#define ATTND_HAVE_AMX 1
#else
#define ATTND_HAVE_AMX 0
#endif
#define ATTND_AMX __attribute__((target("amx-tile,amx-bf16")))

namespace attnd {

inline constexpr int kAmxRows = 16;        // rows of a tile
inline constexpr int kAmxChunkSteps = 16;  // steps of B (bf16 pairs) in a tile
inline constexpr int kAmxColumns = 16;     // columns of a tile

// True where this process may use AMX tiles of bf16.
bool AmxStreamAvailable();

// The rows of one pass over B and of the tile configuration: rows beyond 16 are shared out evenly, so that one
// configuration serves all passes. args.a and args.c must have room for AmxPaddedRows(rows) rows.
int AmxPassRows(int rows);
int AmxPaddedRows(int rows);

// The tile configuration for passes of so many rows, 1..16; loading it is a matter of the thread, as is its end
// (Brgemm::ReleaseContext).
const void* AmxConfig(int pass_rows);
void AmxLoad(const void* config);

// As StreamProduct, A as bf16 and B as bf16 pairs. REQUIRES: the thread holds AmxConfig(AmxPassRows(args.rows));
// args.steps is a multiple of kAmxChunkSteps, args.columns of kAmxColumns.
void AmxStreamProduct(const StreamArgs& args);

}  // namespace attnd

#endif  // ATTND_KERNELS_AMX_STREAM_H_

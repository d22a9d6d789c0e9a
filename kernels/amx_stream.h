// Products of few rows with bf16 blocks, and of any rows with int8 blocks, on AMX tiles, with the prefetch of the block
// list between the tiles, where an opaque call cannot have it. For bf16 these are the ukernel's instructions in the
// ukernel's order, so its bits; for int8 the sums are exact.
#ifndef ATTND_KERNELS_AMX_STREAM_H_
#define ATTND_KERNELS_AMX_STREAM_H_

#include "kernels/streaming.h"

namespace attnd {

inline constexpr int kAmxRows = 16;        // rows of a tile
inline constexpr int kAmxChunkSteps = 16;  // steps of B (bf16 pairs, s8 quads) in a tile
inline constexpr int kAmxColumns = 16;     // columns of a tile

// True where this process may use AMX tiles of bf16 and s8.
bool AmxStreamAvailable();

constexpr bool IsAmx(StreamMode mode) { return mode == StreamMode::kAmx || mode == StreamMode::kAmxInt8; }

// A pass over B serves up to 16 rows, or 8 in halves. More rows are shared out evenly, so that one tile configuration
// serves all passes. args.a and args.c must have room for so many:
int AmxPaddedRows(StreamMode mode, int rows);

// The tile configuration for products of so many rows; loading it is a matter of the thread, as is its end
// (Brgemm::ReleaseContext).
const void* AmxConfig(StreamMode mode, int rows);
void AmxLoad(const void* config);

// As StreamProduct. REQUIRES: the thread holds AmxConfig(mode, args.rows); args.steps is a multiple of kAmxChunkSteps,
// args.columns of kAmxColumns.
void AmxStreamProduct(StreamMode mode, const StreamArgs& args);

}  // namespace attnd

#endif  // ATTND_KERNELS_AMX_STREAM_H_

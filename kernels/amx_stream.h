// The streaming kernel on AMX tiles: what the ukernel multiplies, in the same order, but with the prefetch of what
// comes next between the tiles. With FMAs instead (StreamMode::kTiles) a decode is bound by the multiplication, not by
// memory.
#ifndef ATTND_KERNELS_AMX_STREAM_H_
#define ATTND_KERNELS_AMX_STREAM_H_

#include "kernels/streaming.h"

namespace attnd {

// Has the CPU AMX for bf16, may this process use it, and does ONEDNN_MAX_CPU_ISA allow it?
bool AmxStreamAvailable();

// A and B in bf16. Leaves the thread's tiles released.
// REQUIRES: columns a multiple of 16, or steps a multiple of 16 (a tile has one kind of tail, not both).
void AmxStream(const StreamArgs& args);

}  // namespace attnd

#endif  // ATTND_KERNELS_AMX_STREAM_H_

// Tiles of many rows on AMX: the multiplication of one part of a tile runs while the weights of another are computed.
// The tile unit works by itself for hundreds of cycles once its instructions are issued; an opaque call for a whole
// strip leaves it idle during the softmax, which takes as long as both products.
#ifndef ATTND_KERNELS_PIPELINE_H_
#define ATTND_KERNELS_PIPELINE_H_

#include "kernels/tile.h"

namespace attnd {

// As ComputeRuns, for tiles that their kernels pipeline.
int ComputePipelined(const Tile& tile, int64_t begin, int64_t end, const RunPlaces& places, TileScratch* scratch);

}  // namespace attnd

#endif  // ATTND_KERNELS_PIPELINE_H_

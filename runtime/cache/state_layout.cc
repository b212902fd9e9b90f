#include "runtime/cache/state_layout.h"

#include "kernels/base/types.h"

namespace deltamesh {

static_assert(kTileTokens == kernels::kTile,
              "the slab's open tile is what the KDA kernels advance");
static_assert(kBlockTokens == kernels::kBlock, "attention walks the pool's blocks");
static_assert(kBlockTokens % kTileTokens == 0, "a block boundary must be a tile boundary");

}  // namespace deltamesh

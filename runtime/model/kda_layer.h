// Kimi Delta Attention of one layer (model.md 6): the token mixer with a recurrent state.
#pragma once

#include "runtime/model/config.h"
#include "runtime/model/step.h"
#include "runtime/model/weights.h"

namespace deltamesh {

// out = mixer(x), both [tokens, hidden], not the same memory. Advances layer `kda_index` of every chunk's
// slab: conv tails, recurrent state, open tile.
void KdaLayer(const ModelConfig& config, const KdaWeights& w, int64_t kda_index, const Step& step,
              const float* x, float* out);

}  // namespace deltamesh

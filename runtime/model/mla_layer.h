// Multi-head latent attention of one layer, without positions (model.md 7), in absorbed form for every
// token, so that prefill and decode do the same arithmetic.
#pragma once

#include "runtime/model/config.h"
#include "runtime/model/step.h"
#include "runtime/model/weights.h"

namespace deltamesh {

// out = mixer(x), both [tokens, hidden], not the same memory. Writes the rows [latent | extra key] of the
// chunk's positions into layer `mla_index` of its blocks, which must have been reserved.
void MlaLayer(const ModelConfig& config, const MlaWeights& w, int64_t mla_index, const Step& step,
              const float* x, float* out);

}  // namespace deltamesh

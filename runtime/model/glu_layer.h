// A gated feed-forward (model.md 8.1): the dense layers and the shared experts.
#pragma once

#include "runtime/model/config.h"
#include "runtime/model/step.h"
#include "runtime/model/weights.h"

namespace deltamesh {

// out = down(act(gate x, up x)), both [tokens, hidden], not the same memory.
void GluLayer(const ModelConfig& config, const GluWeights& w, const Step& step, const float* x,
              float* out);

}  // namespace deltamesh

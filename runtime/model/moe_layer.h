// A mixture of experts (model.md 8.2, 8.3), with routed experts in the hidden width or in a latent one.
#pragma once

#include "absl/status/status.h"
#include "runtime/expert/backend.h"
#include "runtime/model/config.h"
#include "runtime/model/step.h"
#include "runtime/model/weights.h"

namespace deltamesh {

// out = moe(x), both [tokens, hidden], not the same memory. `layer` is the model's layer number. The
// shared expert is computed while the backend works. Fails as the backend fails.
absl::Status MoeLayer(const ModelConfig& config, const MoeWeights& w, int64_t layer,
                      ExpertBackend& experts, const Step& step, const float* x, float* out);

}  // namespace deltamesh

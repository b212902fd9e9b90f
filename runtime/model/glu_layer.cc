#include "runtime/model/glu_layer.h"

#include <array>

#include "kernels/moe/moe.h"
#include "runtime/model/project.h"

namespace deltamesh {

void GluLayer(const ModelConfig& config, const GluWeights& w, const Step& step, const float* x,
              float* out) {
  Workspace::Scope scope(step.workspace);
  const int64_t T = step.tokens, inter = w.gate.rows;
  float* gate = step.workspace.Floats(T * inter);
  float* up = step.workspace.Floats(T * inter);
  const std::array both{Projection{x, config.hidden, w.gate, gate, inter},
                        Projection{x, config.hidden, w.up, up, inter}};
  Project(step, T, both);
  step.pool.ParallelFor(T, RowGrain(32 * inter), [&](int64_t begin, int64_t end) {
    kernels::Glu({.gate = gate + begin * inter,
                  .up = up + begin * inter,
                  .stride = inter,
                  .activation = config.activation,
                  .beta = config.act_beta,
                  .linear_beta = config.act_linear_beta,
                  .y = gate + begin * inter,
                  .y_stride = inter,
                  .rows = end - begin,
                  .width = inter});
  });
  Project(step, T, gate, w.down, out);
}

}  // namespace deltamesh

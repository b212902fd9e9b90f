#include "runtime/model/moe_layer.h"

#include <algorithm>
#include <array>

#include "kernels/moe/moe.h"
#include "runtime/base/status.h"
#include "runtime/model/glu_layer.h"
#include "runtime/model/project.h"
#include "runtime/model/rows.h"

namespace deltamesh {

namespace {

// Picks experts from the logits [tokens, experts].
void Route(const ModelConfig& c, const MoeWeights& w, const Step& step, const float* logits,
           int32_t* ids, float* weights) {
  const int64_t experts = c.experts, top_k = c.top_k;
  step.pool.ParallelFor(step.tokens, RowGrain(32 * experts), [&](int64_t begin, int64_t end) {
    kernels::ExpertGate({.logits = logits + begin * experts,
                         .bias = w.bias.data(),
                         .tokens = end - begin,
                         .experts = experts,
                         .top_k = top_k,
                         .groups = c.expert_groups,
                         .top_groups = c.top_groups,
                         .sigmoid = c.sigmoid_scores,
                         .renormalize = c.renormalize,
                         .biased_weights = c.biased_router_weights,
                         .scale = c.route_scale,
                         .ids = ids + begin * top_k,
                         .weights = weights + begin * top_k});
  });
}

void CombineRows(const Step& step, int64_t top_k, int64_t width, const float* rows,
                 const float* weights, float* y) {
  step.pool.ParallelFor(step.tokens, RowGrain(top_k * width), [&](int64_t begin, int64_t end) {
    kernels::Combine({.rows = rows + begin * top_k * width,
                      .weights = weights + begin * top_k,
                      .y = y + begin * width,
                      .tokens = end - begin,
                      .top_k = top_k,
                      .width = width});
  });
}

}  // namespace

absl::Status MoeLayer(const ModelConfig& config, const MoeWeights& w, int64_t layer,
                      ExpertBackend& experts, const Step& step, const float* x, float* out) {
  Workspace& ws = step.workspace;
  Workspace::Scope scope(ws);
  const int64_t T = step.tokens, hidden = config.hidden, top_k = config.top_k;
  const int64_t width = config.expert_width();
  const bool latent = config.latent > 0;

  float* logits = ws.Floats(T * config.experts);
  float* rows_in = latent ? ws.Floats(T * width) : nullptr;
  const std::array first{Projection{x, hidden, w.gate, logits, config.experts},
                         Projection{x, hidden, w.latent_down, rows_in, width}};
  Project(step, T, std::span(first).first(latent ? 2 : 1));
  auto* ids = ws.Take<int32_t>(T * top_k);
  float* weights = ws.Floats(T * top_k);
  Route(config, w, step, logits, ids, weights);

  float* rows_out = ws.Floats(T * top_k * width);
  ASSIGN_OR_RETURN(const uint64_t ticket, experts.Start({.layer = layer,
                                                         .tokens = T,
                                                         .top_k = top_k,
                                                         .width = width,
                                                         .x = latent ? rows_in : x,
                                                         .ids = ids,
                                                         .out = rows_out}));
  float* shared = nullptr;
  if (config.shared_experts > 0) {
    shared = ws.Floats(T * hidden);
    GluLayer(config, w.shared, step, x, shared);
  }
  RETURN_IF_ERROR(experts.Finish(ticket));

  float* routed = latent ? ws.Floats(T * width) : out;
  CombineRows(step, top_k, width, rows_out, weights, routed);
  if (latent) {
    if (config.latent_norm) {
      NormRows(step.pool, T, width, routed, w.latent_norm.data(), config.rms_eps, routed);
    }
    Project(step, T, routed, w.latent_up, out);
  }
  if (shared != nullptr) AddRows(step.pool, T, hidden, shared, out);
  return absl::OkStatus();
}

}  // namespace deltamesh

#include "services/cli/bench_cost.h"

#include <cmath>

#include "kernels/gemm/gemm.h"

namespace deltamesh {
namespace {

double ExpertBytes(const Model& model) {
  for (const auto& layer : model.experts().layers) {
    if (layer.empty()) continue;
    const ExpertWeights& e = layer.front();
    double bytes = 0;
    for (const kernels::PackedMatrix* m : {&e.gate, &e.up, &e.down}) {
      bytes += static_cast<double>(kernels::PackedBytes(m->format, m->rows, m->cols));
    }
    return bytes;
  }
  return 0;
}

}  // namespace

double StepBytes(const Model& model, int64_t sequences, double context) {
  const ModelConfig& c = model.config();
  const double moe_layers = static_cast<double>(c.CountFfn(FfnKind::kMoe));
  const double e = static_cast<double>(c.experts), k = static_cast<double>(c.top_k);
  const double distinct =
      c.experts == 0 ? 0 : e * (1 - std::pow(1 - k / e, static_cast<double>(sequences)));
  const double rest =
      static_cast<double>(model.weight_bytes()) - moe_layers * e * ExpertBytes(model);
  const StateLayout& l = model.state_layout();
  const double slab =
      static_cast<double>(l.kda_layers * l.s_floats()) * 4 * (1 + 2.0 / kTileTokens);
  const double latents = static_cast<double>(l.mla_layers * l.latent_width()) * 4 * context;
  return rest + moe_layers * distinct * ExpertBytes(model) +
         static_cast<double>(sequences) * (slab + latents);
}

namespace {

double d(int64_t x) { return static_cast<double>(x); }

// Multiply-adds of the routed experts that one token takes, of all layers.
double ExpertWork(const ModelConfig& c) {
  return d(c.CountFfn(FfnKind::kMoe)) * d(c.top_k) * 3 * d(c.expert_width()) * d(c.moe_inter);
}

// Of all matrices that one token is multiplied with.
double MatrixWork(const ModelConfig& c) {
  const double kda = d(c.CountMixer(MixerKind::kKda)), mla = d(c.CountMixer(MixerKind::kMla));
  const double gate = c.full_rank_gate ? d(c.hidden) * d(c.kda_width())
                                       : d(c.kda_dim) * (d(c.hidden) + d(c.kda_width()));
  const double kda_weights = 4 * d(c.hidden) * d(c.kda_width()) + gate +
                             d(c.kda_dim) * (d(c.hidden) + d(c.kda_width())) +
                             d(c.hidden) * d(c.kda_heads);
  const double q_out = d(c.heads) * d(c.nope + c.rope);
  const double mla_weights =
      (c.q_rank > 0 ? d(c.q_rank) * (d(c.hidden) + q_out) : d(c.hidden) * q_out) +
      d(c.hidden) * d(c.kv_rank + c.rope) + d(c.heads) * d(c.nope + c.v_dim) * d(c.kv_rank) +
      d(c.hidden) * d(c.heads) * d(c.v_dim) * (c.mla_gate ? 2 : 1);
  const double latent_weights = c.latent > 0 ? 2 * d(c.hidden) * d(c.latent) : 0;
  const double moe_weights =
      3 * d(c.hidden) * d(c.shared_inter()) + d(c.hidden) * d(c.experts) + latent_weights;
  return kda * kda_weights + mla * mla_weights +
         d(c.CountFfn(FfnKind::kDense)) * 3 * d(c.hidden) * d(c.dense_inter) +
         d(c.CountFfn(FfnKind::kMoe)) * moe_weights + ExpertWork(c);
}

}  // namespace

double TokenFlops(const Model& model, double context) {
  const ModelConfig& c = model.config();
  const double kda = d(c.CountMixer(MixerKind::kKda)), mla = d(c.CountMixer(MixerKind::kMla));
  return 2 * MatrixWork(c) + kda * 7 * d(c.kda_heads) * d(c.kda_dim) * d(c.kda_dim) +
         mla * 2 * d(c.heads) * d(c.nope + c.rope + c.v_dim) * context;
}

double TokenNarrowFlops(const Model& model, bool weights_8bit) {
  const ModelConfig& c = model.config();
  if (!weights_8bit) return c.experts_mxfp4 ? 2 * ExpertWork(c) : 0;
  const double router = d(c.CountFfn(FfnKind::kMoe)) * d(c.hidden) * d(c.experts);
  return 2 * (MatrixWork(c) - router);
}

}  // namespace deltamesh

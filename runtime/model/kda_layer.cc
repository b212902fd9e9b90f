#include "runtime/model/kda_layer.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/conv/conv.h"
#include "kernels/kda/kda.h"
#include "kernels/moe/moe.h"
#include "kernels/norm/norm.h"
#include "runtime/model/project.h"

namespace deltamesh {

namespace {

// Everything one layer needs between its projections; channels are heads * dim.
struct KdaBuffers {
  float* raw[3];    // [tokens, channels]: projected q, k, v
  float* mixed[3];  // the same after convolution, SiLU and norms
  float* decay;     // [tokens, channels]: z, then a = exp(g)
  float* gate;      // [tokens, channels]
  float* beta;      // [tokens, heads]
  float* o;         // [tokens, channels]
};

KdaBuffers TakeBuffers(const ModelConfig& c, const Step& step) {
  Workspace& ws = step.workspace;
  const int64_t values = step.tokens * c.kda_width();
  KdaBuffers b;
  for (float*& p : b.raw) p = ws.Floats(values);
  for (float*& p : b.mixed) p = ws.Floats(values);
  b.decay = ws.Floats(values);
  b.gate = ws.Floats(values);
  b.beta = ws.Floats(step.tokens * c.kda_heads);
  b.o = ws.Floats(values);
  return b;
}

void ProjectInputs(const ModelConfig& c, const KdaWeights& w, const Step& step, const float* x,
                   const KdaBuffers& b) {
  const int64_t T = step.tokens, hidden = c.hidden, width = c.kda_width(), dim = c.kda_dim;
  float* f_low = step.workspace.Floats(T * dim);
  float* g_low = step.workspace.Floats(T * dim);
  const Projection gate = c.full_rank_gate ? Projection{x, hidden, w.g, b.gate, width}
                                           : Projection{x, hidden, w.g_a, g_low, dim};
  const std::array first{
      Projection{x, hidden, w.q, b.raw[0], width},     Projection{x, hidden, w.k, b.raw[1], width},
      Projection{x, hidden, w.v, b.raw[2], width},     Projection{x, hidden, w.f_a, f_low, dim},
      Projection{x, hidden, w.b, b.beta, c.kda_heads}, gate};
  Project(step, T, first);
  const std::array second{Projection{f_low, dim, w.f_b, b.decay, width},
                          Projection{g_low, dim, w.g_b, b.gate, width}};
  Project(step, T, std::span(second).first(c.full_rank_gate ? 1 : 2));
}

// beta = sigmoid(beta). The kernel gates a value, here 1.
void WriteStrength(const Step& step, int64_t heads, float* beta) {
  const int64_t count = step.tokens * heads;
  float* ones = step.workspace.Floats(count);
  std::fill_n(ones, count, 1.0f);
  kernels::SigmoidGate({.x = ones, .gate = beta, .y = beta, .count = count});
}

// From raw projections to q, k, v of one head of one chunk: convolution with SiLU, then the norms of q, k.
void MixHead(const ModelConfig& c, const KdaWeights& w, const SlabLayer& slab,
             const StepChunk& chunk, int64_t head, const KdaBuffers& b) {
  const int64_t width = c.kda_width(), dim = c.kda_dim, row = chunk.first * width;
  const FloatVector* filters[3] = {&w.q_conv, &w.k_conv, &w.v_conv};
  for (int64_t i = 0; i < 3; ++i) {
    kernels::ShortConv({.x = b.raw[i] + row,
                        .x_stride = width,
                        .tail = slab.conv + i * (c.conv_taps - 1) * width,
                        .tail_stride = width,
                        .weight = filters[i]->data(),
                        .weight_stride = width,
                        .y = b.mixed[i] + row,
                        .y_stride = width,
                        .tokens = chunk.tokens,
                        .taps = c.conv_taps,
                        .channel_begin = head * dim,
                        .channel_end = (head + 1) * dim});
  }
  const auto q_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
  for (int64_t i = 0; i < 2; ++i) {
    kernels::L2Norm({.x = b.mixed[i] + row + head * dim,
                     .stride = width,
                     .eps = kL2NormEps,
                     .scale = i == 0 ? q_scale : 1.0f,
                     .rows = chunk.tokens,
                     .dim = dim});
  }
}

// Everything between the projections of one head of one chunk: it touches only this head's channels, so
// heads and chunks run in any order.
void AdvanceHead(const ModelConfig& c, const KdaWeights& w, int64_t kda_index,
                 const StepChunk& chunk, int64_t head, const KdaBuffers& b) {
  const int64_t width = c.kda_width(), row = chunk.first * width;
  const SlabLayer slab = chunk.state->slab_layer(kda_index);
  MixHead(c, w, slab, chunk, head, b);
  kernels::KdaDecay({.z = b.decay + row,
                     .z_stride = width,
                     .dt_bias = w.dt_bias.data(),
                     .a_scale = w.a_scale.data(),
                     .bounded = c.bounded_decay,
                     .lower_bound = c.decay_lower_bound,
                     .a = b.decay + row,
                     .a_stride = width,
                     .tokens = chunk.tokens,
                     .dim = c.kda_dim,
                     .head_begin = head,
                     .head_end = head + 1});
  kernels::KdaAdvance({.q = b.mixed[0] + row,
                       .k = b.mixed[1] + row,
                       .v = b.mixed[2] + row,
                       .a = b.decay + row,
                       .stride = width,
                       .beta = b.beta + chunk.first * c.kda_heads,
                       .beta_stride = c.kda_heads,
                       .state = {.s = slab.s, .decay = slab.decay, .khat = slab.khat, .u = slab.u},
                       .open_rows = chunk.start % kTileTokens,
                       .o = b.o + row,
                       .o_stride = width,
                       .tokens = chunk.tokens,
                       .dim = c.kda_dim,
                       .head_begin = head,
                       .head_end = head + 1});
}

// S and conv of one head, to the same layer of another slab.
void CopyHead(const ModelConfig& c, const SlabLayer& from, const SlabLayer& to, int64_t head) {
  const int64_t dim = c.kda_dim, matrix = dim * dim;
  std::copy_n(from.s + head * matrix, matrix, to.s + head * matrix);
  for (int64_t row = 0; row < 3 * (c.conv_taps - 1); ++row) {
    const int64_t at = row * c.kda_width() + head * dim;
    std::copy_n(from.conv + at, dim, to.conv + at);
  }
}

// AdvanceHead, with a stop where a copy is wanted.
void AdvanceAndCopyHead(const ModelConfig& c, const KdaWeights& w, int64_t kda_index,
                        const StepChunk& chunk, int64_t head, const KdaBuffers& b) {
  if (chunk.copy == nullptr) return AdvanceHead(c, w, kda_index, chunk, head, b);
  StepChunk before = chunk, after = chunk;
  before.tokens = chunk.copy_after;
  after.first += chunk.copy_after;
  after.start += chunk.copy_after;
  after.tokens -= chunk.copy_after;
  AdvanceHead(c, w, kda_index, before, head, b);
  CopyHead(c, chunk.state->slab_layer(kda_index), chunk.copy->slab_layer(kda_index), head);
  AdvanceHead(c, w, kda_index, after, head, b);
}

void NormAndGate(const ModelConfig& c, const KdaWeights& w, const Step& step, const KdaBuffers& b) {
  const int64_t dim = c.kda_dim;
  step.pool.ParallelFor(step.tokens * c.kda_heads, RowGrain(16 * dim),
                        [&](int64_t begin, int64_t end) {
                          kernels::GatedNorm({.o = b.o + begin * dim,
                                              .gate = b.gate + begin * dim,
                                              .weight = w.o_norm.data(),
                                              .eps = c.rms_eps,
                                              .y = b.o + begin * dim,
                                              .rows = end - begin,
                                              .dim = dim});
                        });
}

}  // namespace

void KdaLayer(const ModelConfig& config, const KdaWeights& w, int64_t kda_index, const Step& step,
              const float* x, float* out) {
  Workspace::Scope scope(step.workspace);
  const KdaBuffers b = TakeBuffers(config, step);
  ProjectInputs(config, w, step, x, b);
  WriteStrength(step, config.kda_heads, b.beta);
  const int64_t heads = config.kda_heads;
  const auto chunks = static_cast<int64_t>(step.chunks.size());
  const int64_t item_cost = 3 * config.kda_dim * config.kda_dim * (step.tokens / chunks);
  step.pool.ParallelFor(chunks * heads, RowGrain(item_cost), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const StepChunk& chunk = step.chunks[static_cast<size_t>(i / heads)];
      AdvanceAndCopyHead(config, w, kda_index, chunk, i % heads, b);
    }
  });
  NormAndGate(config, w, step, b);
  Project(step, step.tokens, b.o, w.o, out);
}

}  // namespace deltamesh

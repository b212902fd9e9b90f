#include "runtime/model/mla_layer.h"

#include <algorithm>
#include <array>

#include "kernels/mla/mla.h"
#include "kernels/norm/norm.h"
#include "runtime/model/project.h"
#include "runtime/model/rows.h"

namespace deltamesh {

namespace {

struct MlaBuffers {
  float* q;         // [tokens][heads][nope + rope]
  float* q_latent;  // [tokens][heads][rank]
  float* kv;        // [tokens][rank + rope]: latent before its norm, then the extra key
  float* o_latent;  // [tokens][heads][rank]
  float* o;         // [tokens][heads][v_dim]
  float* gate;      // [tokens][heads][v_dim]; mla_gate only
};

MlaBuffers TakeBuffers(const ModelConfig& c, const Step& step) {
  Workspace& ws = step.workspace;
  const int64_t pairs = step.tokens * c.heads;
  MlaBuffers b;
  b.q = ws.Floats(pairs * (c.nope + c.rope));
  b.q_latent = ws.Floats(pairs * c.kv_rank);
  b.kv = ws.Floats(step.tokens * (c.kv_rank + c.rope));
  b.o_latent = ws.Floats(pairs * c.kv_rank);
  b.o = ws.Floats(pairs * c.v_dim);
  b.gate = c.mla_gate ? ws.Floats(pairs * c.v_dim) : nullptr;
  return b;
}

void ProjectInputs(const ModelConfig& c, const MlaWeights& w, const Step& step, const float* x,
                   const MlaBuffers& b) {
  const int64_t T = step.tokens, hidden = c.hidden, q_width = c.heads * (c.nope + c.rope);
  const bool low_rank = c.q_rank > 0;
  float* q_low = low_rank ? step.workspace.Floats(T * c.q_rank) : nullptr;
  const std::array first{low_rank ? Projection{x, hidden, w.q_a, q_low, c.q_rank}
                                  : Projection{x, hidden, w.q, b.q, q_width},
                         Projection{x, hidden, w.kv_a, b.kv, c.kv_rank + c.rope},
                         Projection{x, hidden, w.g, b.gate, c.heads * c.v_dim}};
  Project(step.pool, T, std::span(first).first(c.mla_gate ? 3 : 2));
  if (!low_rank) return;
  NormRows(step.pool, T, c.q_rank, q_low, w.q_a_norm.data(), kLatentNormEps, q_low);
  Project(step.pool, T, q_low, w.q_b, b.q);
}

// y[t][head] = x[t][head] * w[head]^T, rows of x starting `x_head` apart from head to head.
void ProjectHeads(const Step& step, const std::vector<PackedMatrix>& w, const float* x,
                  int64_t x_head, float* y) {
  const int64_t heads = static_cast<int64_t>(w.size());
  auto* each = step.workspace.Take<Projection>(heads);
  for (int64_t h = 0; h < heads; ++h) {
    const PackedMatrix& m = w[static_cast<size_t>(h)];
    each[h] = {x + h * x_head, heads * x_head, m, y + h * m.rows, heads * m.rows};
  }
  Project(step.pool, step.tokens, {each, static_cast<size_t>(heads)});
}

// Appends the latents and extra keys of all chunks to their blocks.
void WriteLatents(const ModelConfig& c, const MlaWeights& w, int64_t mla_index, const Step& step,
                  const float* kv) {
  const int64_t width = c.kv_rank + c.rope;
  for (const StepChunk& chunk : step.chunks) {
    for (int64_t t = 0; t < chunk.tokens; ++t) {
      const int64_t position = chunk.start + t;
      float* row = chunk.state->block_layer(position / kBlockTokens, mla_index) +
                   position % kBlockTokens * width;
      const float* in = kv + (chunk.first + t) * width;
      kernels::RmsNorm({.x = in,
                        .x_stride = width,
                        .weight = w.kv_a_norm.data(),
                        .eps = kLatentNormEps,
                        .y = row,
                        .y_stride = width,
                        .tokens = 1,
                        .dim = c.kv_rank});
      std::copy_n(in + c.kv_rank, c.rope, row + c.kv_rank);
    }
  }
}

// The blocks that cover every position of a chunk once this step is done.
const float* const* BlockPointers(const StepChunk& chunk, int64_t mla_index, Workspace& ws) {
  const int64_t count = (chunk.start + chunk.tokens + kBlockTokens - 1) / kBlockTokens;
  auto** blocks = ws.Take<const float*>(count);
  for (int64_t i = 0; i < count; ++i) blocks[i] = chunk.state->block_layer(i, mla_index);
  return blocks;
}

void Attend(const ModelConfig& c, int64_t mla_index, const Step& step, const MlaBuffers& b) {
  const int64_t heads = c.heads, q_head = c.nope + c.rope;
  const int64_t chunks = static_cast<int64_t>(step.chunks.size());
  auto* blocks = step.workspace.Take<const float* const*>(chunks);
  int64_t longest = 0;
  for (int64_t i = 0; i < chunks; ++i) {
    const StepChunk& chunk = step.chunks[static_cast<size_t>(i)];
    blocks[i] = BlockPointers(chunk, mla_index, step.workspace);
    longest = std::max(longest, chunk.start + chunk.tokens);
  }
  const int64_t pair_cost = longest * (2 * c.kv_rank + c.rope);
  step.pool.ParallelFor(step.tokens * heads, RowGrain(pair_cost), [&](int64_t begin, int64_t end) {
    for (int64_t i = 0; i < chunks; ++i) {
      const StepChunk& chunk = step.chunks[static_cast<size_t>(i)];
      const int64_t first = chunk.first * heads;  // number of the chunk's first pair
      const int64_t pair_begin = std::max(begin - first, int64_t{0});
      const int64_t pair_end = std::min(end - first, chunk.tokens * heads);
      if (pair_begin >= pair_end) continue;
      kernels::MlaAttend({.q_latent = b.q_latent + first * c.kv_rank,
                          .q_rope = b.q + first * q_head + c.nope,
                          .q_rope_head_stride = q_head,
                          .q_rope_token_stride = heads * q_head,
                          .blocks = blocks[i],
                          .start = chunk.start,
                          .scale = c.mla_scale(),
                          .o = b.o_latent + first * c.kv_rank,
                          .tokens = chunk.tokens,
                          .heads = heads,
                          .rank = c.kv_rank,
                          .rope = c.rope,
                          .pair_begin = pair_begin,
                          .pair_end = pair_end});
    }
  });
}

}  // namespace

void MlaLayer(const ModelConfig& config, const MlaWeights& w, int64_t mla_index, const Step& step,
              const float* x, float* out) {
  Workspace::Scope scope(step.workspace);
  const MlaBuffers b = TakeBuffers(config, step);
  ProjectInputs(config, w, step, x, b);
  WriteLatents(config, w, mla_index, step, b.kv);
  ProjectHeads(step, w.wk, b.q, config.nope + config.rope, b.q_latent);
  Attend(config, mla_index, step, b);
  ProjectHeads(step, w.wv, b.o_latent, config.kv_rank, b.o);
  const int64_t width = config.heads * config.v_dim;
  if (config.mla_gate) GateRows(step.pool, step.tokens, width, b.o, b.gate);
  Project(step.pool, step.tokens, b.o, w.o, out);
}

}  // namespace deltamesh

#include "runtime/model/mla_layer.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <span>
#include <utility>

#include "absl/functional/function_ref.h"
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
  Project(step, T, std::span(first).first(c.mla_gate ? 3 : 2));
  if (!low_rank) return;
  NormRows(step.pool, T, c.q_rank, q_low, w.q_a_norm.data(), kLatentNormEps, q_low);
  Project(step, T, q_low, w.q_b, b.q);
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
  Project(step, step.tokens, {each, static_cast<size_t>(heads)});
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

// One chunk's part of the attention of a step; o is [tokens][heads][rank] of the chunk.
kernels::MlaAttendParams AttendParams(const ModelConfig& c, const StepChunk& chunk,
                                      int64_t mla_index, const MlaBuffers& b, Workspace& ws) {
  const int64_t first = chunk.first * c.heads, q_head = c.nope + c.rope;
  return {.q_latent = b.q_latent + first * c.kv_rank,
          .q_rope = b.q + first * q_head + c.nope,
          .q_rope_head_stride = q_head,
          .q_rope_token_stride = c.heads * q_head,
          .blocks = BlockPointers(chunk, mla_index, ws),
          .start = chunk.start,
          .scale = c.mla_scale(),
          .o = b.o_latent + first * c.kv_rank,
          .tokens = chunk.tokens,
          .heads = c.heads,
          .rank = c.kv_rank,
          .rope = c.rope,
          .pair_begin = 0,
          .pair_end = chunk.tokens * c.heads};
}

// (chunk, piece of its work) for numbers that count the pieces of all chunks.
struct Pieces {
  std::span<int64_t> ends;  // running sums of the chunks' pieces
  int64_t count() const { return ends.empty() ? 0 : ends.back(); }
  std::pair<int64_t, int64_t> At(int64_t i) const {
    const auto chunk = std::upper_bound(ends.begin(), ends.end(), i) - ends.begin();
    return {chunk, chunk == 0 ? i : i - ends[static_cast<size_t>(chunk - 1)]};
  }
};

template <typename Count>  // of a chunk's pieces
Pieces MakePieces(int64_t chunks, Workspace& ws, const Count& count) {
  auto* ends = ws.Take<int64_t>(chunks);
  for (int64_t i = 0; i < chunks; ++i) ends[i] = count(i) + (i == 0 ? 0 : ends[i - 1]);
  return {{ends, static_cast<size_t>(chunks)}};
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t GroupCount(const kernels::MlaAttendParams& p) {
  return CeilDiv(p.tokens * p.heads, kernels::kMlaGroup);
}
// Of one pair and one span.
int64_t PairCost(const kernels::MlaAttendParams& p) {
  return kernels::kBlock * kernels::kSpanBlocks * (2 * p.rank + p.rope);
}
int64_t SpanCount(const kernels::MlaAttendParams& p) {
  return CeilDiv(p.start + p.tokens, kernels::kBlock * kernels::kSpanBlocks);
}

// Calls body(i) for every i < n, each as soon as a thread is free for it: the pieces are few and long.
void ForEach(ThreadPool& pool, int64_t n, int64_t piece_cost,
             absl::FunctionRef<void(int64_t)> body) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min(CeilDiv(n, RowGrain(piece_cost)), int64_t{pool.threads()});
  pool.ParallelFor(threads, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) body(i);
  });
}

using Chunks = std::span<const kernels::MlaAttendParams>;

// Many queries: each group of pairs walks over its whole context.
void AttendByGroups(const Step& step, Chunks chunks) {
  const Pieces groups = MakePieces(std::ssize(chunks), step.workspace, [&](int64_t i) {
    return GroupCount(chunks[static_cast<size_t>(i)]);
  });
  ForEach(step.pool, groups.count(), PairCost(chunks[0]) * kernels::kMlaGroup, [&](int64_t i) {
    const auto [chunk, group] = groups.At(i);
    kernels::MlaAttendParams p = chunks[static_cast<size_t>(chunk)];
    p.pair_begin = group * kernels::kMlaGroup;
    p.pair_end = std::min(p.pair_begin + kernels::kMlaGroup, p.pair_end);
    kernels::MlaAttend(p);
  });
}

// Few queries: the context is cut into its spans too, so every thread has work and a latent is read once by
// the machine for each group of pairs. As many spans at a time as kPartialFloats hold.
void AttendBySpans(const Step& step, Chunks chunks) {
  constexpr int64_t kPartialFloats = int64_t{1} << 22;
  Workspace& ws = step.workspace;
  int64_t pairs = 0, longest = 0;
  for (const kernels::MlaAttendParams& p : chunks) {
    pairs += p.tokens * p.heads;
    longest = std::max(longest, SpanCount(p));
  }
  const int64_t rank = chunks[0].rank;
  const int64_t wave = std::clamp(kPartialFloats / (pairs * rank), int64_t{1}, longest);
  float* m = ws.Floats(pairs);
  float* l = ws.Floats(pairs);
  float* span_m = ws.Floats(wave * pairs);
  float* span_l = ws.Floats(wave * pairs);
  float* span_acc = ws.Floats(wave * pairs * rank);

  // The part of chunk i in the wave that begins at span `from`.
  const auto spans_of = [&](int64_t i, int64_t from) {
    return std::clamp(SpanCount(chunks[static_cast<size_t>(i)]) - from, int64_t{0}, wave);
  };
  auto* first_pair = ws.Take<int64_t>(std::ssize(chunks));
  for (int64_t i = 0, at = 0; i < std::ssize(chunks); ++i) {
    first_pair[i] = at;
    at += chunks[static_cast<size_t>(i)].pair_end;
  }
  const auto partials_of = [&](int64_t i, int64_t from) {
    const int64_t at = first_pair[i] * wave;
    return kernels::MlaPartials{
        .m = span_m + at, .l = span_l + at, .acc = span_acc + at * rank, .first_span = from};
  };
  for (int64_t from = 0; from < longest; from += wave) {
    Workspace::Scope scope(ws);
    // A piece is one span for one group of pairs.
    const Pieces pieces = MakePieces(std::ssize(chunks), ws, [&](int64_t i) {
      return spans_of(i, from) * GroupCount(chunks[static_cast<size_t>(i)]);
    });
    const int64_t piece_cost = PairCost(chunks[0]) * std::min(pairs, kernels::kMlaGroup);
    ForEach(step.pool, pieces.count(), piece_cost, [&](int64_t i) {
      const auto [chunk, piece] = pieces.At(i);
      const int64_t spans = spans_of(chunk, from);
      const int64_t span = from + piece % spans;
      kernels::MlaAttendParams p = chunks[static_cast<size_t>(chunk)];
      p.pair_begin = piece / spans * kernels::kMlaGroup;
      p.pair_end = std::min(p.pair_begin + kernels::kMlaGroup, p.pair_end);
      kernels::MlaAttendSpans(p, span, span + 1, partials_of(chunk, from));
    });
    step.pool.ParallelFor(pairs, RowGrain(wave * rank), [&](int64_t begin, int64_t end) {
      for (int64_t i = 0; i < std::ssize(chunks); ++i) {
        const kernels::MlaAttendParams& p = chunks[static_cast<size_t>(i)];
        const int64_t count = spans_of(i, from);
        if (count == 0) continue;
        kernels::MlaMergeSpans(
            {.partials = partials_of(i, from),
             .spans = count,
             .pairs = p.pair_end,
             .rank = rank,
             .m = m + first_pair[i],
             .l = l + first_pair[i],
             .o = p.o,
             .last = from + count == SpanCount(p),
             .pair_begin = std::clamp(begin - first_pair[i], int64_t{0}, p.pair_end),
             .pair_end = std::clamp(end - first_pair[i], int64_t{0}, p.pair_end)});
      }
    });
  }
}

void Attend(const ModelConfig& c, int64_t mla_index, const Step& step, const MlaBuffers& b) {
  // With as many groups as this for each thread, none waits long for the last one.
  constexpr int64_t kGroupsPerThread = 8;
  const size_t count = step.chunks.size();
  auto* params = step.workspace.Take<kernels::MlaAttendParams>(std::ssize(step.chunks));
  int64_t groups = 0;
  for (size_t i = 0; i < count; ++i) {
    params[i] = AttendParams(c, step.chunks[i], mla_index, b, step.workspace);
    groups += GroupCount(params[i]);
  }
  if (groups >= kGroupsPerThread * step.pool.threads()) {
    AttendByGroups(step, {params, count});
  } else {
    AttendBySpans(step, {params, count});
  }
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
  Project(step, step.tokens, b.o, w.o, out);
}

}  // namespace deltamesh

// MLA attention in absorbed form over blocks of latents, causal, no positions (model.md 7).
//
// A row of a block is [latent (rank) | extra key (rope)]. For a query (token at position p, head h):
//   score(s) = chain over ascending i of fma(q_i, row_s[i], .) from +0, q = [q_latent | q_rope];
//              then times scale
// Positions 0..p are cut into blocks of 64 and spans of 8 blocks. Within a span, blocks ascending:
//   m' = max(m, max of scores);  f = exp(m - m');  e_s = exp(score(s) - m')
//   l = fma(l, f, lane sum over the 64 positions of e_s, absent positions +0)
//       (position s is added to lane s mod 16, ascending, from +0; then the tree)
//   acc[r] = acc[r] * f, then fma(e_s, c_s[r], .) over ascending s; absent positions take no part
// (first block of a span: l = sum, acc from +0). Spans merge into a running (m, l, acc) ascending:
//   m' = max(m, ms);  f = exp(m - m');  g = exp(ms - m');  l = fma(l, f, ls * g);
//   acc[r] = fma(acc[r], f, accs[r] * g)
// Result o[r] = acc[r] / l. The first span starts the running values as it is.
//
// Prefill and decode are the same sums, so the same bits; only the split over threads differs: many
// queries are cut by queries (MlaAttend), few by spans (MlaAttendSpans, then MlaMergeSpans).
#pragma once

#include <cstdint>

#include "kernels/base/types.h"

namespace deltamesh::kernels {

// Largest widths: the kernels keep packed queries and accumulators on the stack.
inline constexpr int64_t kMaxRank = 1024;
inline constexpr int64_t kMaxRope = 512;

// Pairs that pass over a block together; callers cut at multiples of it where they can.
inline constexpr int64_t kMlaGroup = 48;

struct MlaAttendParams {
  const float* q_latent;  // [tokens][heads][rank]: W_k already applied to the query
  const float* q_rope;    // [tokens][heads][rope], q_rope_stride floats between heads
  int64_t q_rope_head_stride;
  int64_t q_rope_token_stride;
  // [ceil((start + tokens) / 64)] -> [64][rank + rope]; all 64 rows are readable, those of positions that
  // do not exist yet may hold anything.
  const float* const* blocks;
  int64_t start;  // position of the first token
  float scale;
  float* o;  // [tokens][heads][rank]
  int64_t tokens, heads, rank, rope;
  // (token, head) pairs are numbered token * heads + head; only [pair_begin, pair_end) are
  // computed.
  int64_t pair_begin, pair_end;
};
void MlaAttendRef(const MlaAttendParams& p);
void MlaAttend(const MlaAttendParams& p);

// Spans on their own, from `first_span` on; pairs = tokens * heads. l is 0 where the pair sees nothing of
// the span (acc is then undefined).
struct MlaPartials {
  float *m, *l;  // [spans][pairs]
  float* acc;    // [spans][pairs][rank]
  int64_t first_span;
};
// Fills spans [span_begin, span_end) of the pairs; p.o is not used.
void MlaAttendSpans(const MlaAttendParams& p, int64_t span_begin, int64_t span_end,
                    const MlaPartials& out);

struct MlaMergeParams {
  MlaPartials partials;
  int64_t spans, pairs, rank;  // of partials
  float *m, *l;                // [pairs] running values
  float* o;                    // [pairs][rank]
  bool last;                   // o is divided by l
  int64_t pair_begin, pair_end;
};
void MlaMergeSpans(const MlaMergeParams& p);

}  // namespace deltamesh::kernels

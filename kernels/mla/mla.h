// MLA attention in absorbed form over blocks of latents, causal, no positions (model.md 7).
//
// A row of a block is [latent (rank) | extra key (rope)]. For a query (token at position p, head h):
//   score(s) = (lane sum over rank of q_latent * c_s  [16 lanes, see types.h]
//               continued in the same lanes over rope of q_rope * kr_s, then the tree) * scale
//              lanes restart at 0 for the rope part: lane l takes rope elements l, l + 16, ...
// Positions 0..p are cut into blocks of 64 and spans of 8 blocks. Within a span, blocks ascending:
//   m' = max(m, max of scores);  f = exp(m - m');  e_s = exp(score(s) - m')
//   l = fma(l, f, lane sum over the 64 positions of e_s, absent positions +0)
//       (position s is added to lane s mod 16, ascending, from +0; then the tree)
//   acc[r] = acc[r] * f, then fma(e_s, c_s[r], .) over ascending s; absent positions take no part
// (first block of a span: l = sum, acc from +0). Spans merge into a running (m, l, acc) ascending:
//   m' = max(m, ms);  f = exp(m - m');  g = exp(ms - m');  l = fma(l, f, ls * g);
//   acc[r] = fma(acc[r], f, accs[r] * g)
// Result o[r] = acc[r] / l. The first span starts the running values as it is.
#pragma once

#include <cstdint>

#include "kernels/base/types.h"

namespace deltamesh::kernels {

// Largest rank: the kernels keep one accumulator row on the stack.
inline constexpr int64_t kMaxRank = 1024;

struct MlaAttendParams {
  const float* q_latent;  // [tokens][heads][rank]: W_k already applied to the query
  const float* q_rope;    // [tokens][heads][rope], q_rope_stride floats between heads
  int64_t q_rope_head_stride;
  int64_t q_rope_token_stride;
  const float* const* blocks;  // [ceil((start + tokens) / 64)] -> [64][rank + rope]
  int64_t start;               // position of the first token
  float scale;
  float* o;  // [tokens][heads][rank]
  int64_t tokens, heads, rank, rope;
  // (token, head) pairs are numbered token * heads + head; only [pair_begin, pair_end) are
  // computed.
  int64_t pair_begin, pair_end;
};
void MlaAttendRef(const MlaAttendParams& p);
void MlaAttend(const MlaAttendParams& p);

}  // namespace deltamesh::kernels

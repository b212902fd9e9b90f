// Kimi Delta Attention in chunk form (model.md 13.2), for prefill and decode alike.
//
// Between tile boundaries S is only read. For each token, per head, with n open rows:
//
//   decay[d]    *= a[d]                                      (product of a since the boundary)
//   khat[d][j]  *= a[d]                 for every row j      (keys decayed to now)
//   kd[d] = decay[d] * k[d],  qd[d] = decay[d] * q[d]
//   past[j] = chain over ascending d of fma(k[d], khat[d][j], .)          j < n
//   r[v] = chain over ascending d of fma(kd[d], S[d][v], .), continued over ascending j < n with
//          fma(past[j], u[j][v], .)
//   u[n][v] = beta * (v[v] - r[v]);  khat[d][n] = k[d];  n = n + 1
//   look[j] = chain over ascending d of fma(q[d], khat[d][j], .)          j < n (new row included)
//   o[v] = chain over ascending d of fma(qd[d], S[d][v], .), continued over ascending j < n with
//          fma(look[j], u[j][v], .)
//   n == 16:  S[d][v] = decay[d] * S[d][v], then fma(khat[d][j], u[j][v], .) over ascending j;
//             decay = 1, khat = 0, u = 0, n = 0
//
// Every chain starts at +0. No sum runs across a vector's own lanes. A tile of tokens may be
// computed together as matrix products as long as each element keeps its chain.
#pragma once

#include <cstdint>

#include "kernels/base/types.h"

namespace deltamesh::kernels {

// Largest dim: a tile's decayed keys and queries are kept on the stack.
inline constexpr int64_t kMaxKdaDim = 256;

// a = exp(g) per channel: bounded: g = lower_bound * sigmoid(A * (z + dt_bias)); unbounded:
// g = -A * softplus(z + dt_bias), A = exp(A_log) per head.
struct KdaDecayParams {
  const float* z;  // [tokens, heads * dim], z_stride
  int64_t z_stride;
  const float* dt_bias;  // [heads * dim]
  const float* a_scale;  // [heads]: exp(A_log)
  bool bounded;
  float lower_bound;  // used when bounded; negative
  float* a;           // [tokens, heads * dim], a_stride; may be z
  int64_t a_stride;
  int64_t tokens, dim;
  int64_t head_begin, head_end;
};
void KdaDecayRef(const KdaDecayParams& p);
void KdaDecay(const KdaDecayParams& p);

// The state of one layer of one sequence. All pointers are to head 0; heads are dense.
struct KdaState {
  float* s;      // [heads][dim (key)][dim (value)], at the last tile boundary
  float* decay;  // [heads][dim]; ones when the tile is empty
  float* khat;   // [heads][dim][kTile]; zeros beyond the open rows
  float* u;      // [heads][kTile][dim]; zeros beyond the open rows
};

struct KdaAdvanceParams {
  const float* q;  // [tokens][heads * dim], stride: normalised and scaled
  const float* k;  // normalised
  const float* v;
  const float* a;     // exp(g)
  int64_t stride;     // floats between tokens of q, k, v, a
  const float* beta;  // [tokens][heads], beta_stride: sigmoid already applied
  int64_t beta_stride;
  KdaState state;
  int64_t open_rows;  // rows in the open tile before the first token: position mod kTile
  float* o;           // [tokens][heads * dim], o_stride
  int64_t o_stride;
  int64_t tokens, dim;
  int64_t head_begin, head_end;
};
void KdaAdvanceRef(const KdaAdvanceParams& p);
void KdaAdvance(const KdaAdvanceParams& p);

}  // namespace deltamesh::kernels

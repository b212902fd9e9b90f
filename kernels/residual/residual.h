// Residual streams: the plain sum, and Attention Residuals (model.md 9).
#pragma once

#include <cstdint>

namespace deltamesh::kernels {

// y += x over `count` values.
struct AddParams {
  const float* x;
  float* y;
  int64_t count;
};
void AddRef(const AddParams& p);
void Add(const AddParams& p);

// out[t] = sum_j p_j V_j[t]; p = softmax_j(score_j),
// score_j = (lane sum of V_j * w) * (1 / sqrt(lane sum of V_j^2 / dim + eps)).
// Softmax: e_j = exp(score_j - max), p_j = e_j / (sum over ascending j). The sum over j is an fma
// chain over ascending j from +0. At most kMaxSources sources. `out` may be one of the sources.
inline constexpr int64_t kMaxSources = 64;
struct AttnResParams {
  const float* const* sources;  // [count] -> [tokens, dim], dense
  int64_t count;
  const float* weight;  // [dim]: norm.weight * proj.weight
  float eps;
  float* out;  // [tokens, dim], dense
  int64_t tokens, dim;
};
void AttnResRef(const AttnResParams& p);
void AttnRes(const AttnResParams& p);

}  // namespace deltamesh::kernels

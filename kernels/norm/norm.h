// RMS norms and L2 norms. Sums of squares follow the virtual-lane rule of kernels/base/types.h.
#pragma once

#include <cstdint>

namespace deltamesh::kernels {

// y[t][i] = (x[t][i] * r) * weight[i], r = 1 / sqrt(sum / dim + eps). y may be x.
struct RmsNormParams {
  const float* x;  // [tokens, dim], x_stride floats between rows
  int64_t x_stride;
  const float* weight;  // [dim]
  float eps;
  float* y;  // [tokens, dim], y_stride
  int64_t y_stride;
  int64_t tokens, dim;
};
void RmsNormRef(const RmsNormParams& p);
void RmsNorm(const RmsNormParams& p);

// In place: x[r][i] = (x[r][i] * (1 / sqrt(sum + eps))) * scale; sum of squares, not mean.
struct L2NormParams {
  float* x;  // [rows, dim], stride floats between rows
  int64_t stride;
  float eps;
  float scale;
  int64_t rows, dim;
};
void L2NormRef(const L2NormParams& p);
void L2Norm(const L2NormParams& p);

// KDA output: y = (rms(o; weight, eps)) * sigmoid(gate), per row of dim values. y may be o or gate.
struct GatedNormParams {
  const float* o;       // [rows, dim]
  const float* gate;    // [rows, dim]
  const float* weight;  // [dim], shared by all rows
  float eps;
  float* y;  // [rows, dim]
  int64_t rows, dim;
};
void GatedNormRef(const GatedNormParams& p);
void GatedNorm(const GatedNormParams& p);

}  // namespace deltamesh::kernels

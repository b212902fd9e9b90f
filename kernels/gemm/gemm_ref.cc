#include <algorithm>
#include <cmath>

#include "kernels/gemm/gemm.h"

namespace deltamesh::kernels {
namespace {

// The chain of columns [k0, k1) from `acc`; `scale` becomes the scale of the last.
float Chain(const GemmParams& p, int64_t token, int64_t output, int64_t k0, int64_t k1, float acc,
            float* scale) {
  for (int64_t k = k0; k < k1; ++k) {
    const WeightFactors w = UnpackFactors(p.w, output, k);
    acc = std::fma(p.x[token * p.x_stride + k], w.code, acc);
    *scale = w.scale;
  }
  return acc;
}

float Output(const GemmParams& p, int64_t token, int64_t output) {
  const bool scaled = p.w.format == WeightFormat::kInt8 || p.w.format == WeightFormat::kMxfp4;
  float scale = 1.0f;
  if (!scaled) return Chain(p, token, output, 0, p.w.cols, 0.0f, &scale);
  float acc = 0.0f;
  for (int64_t k = 0; k < p.w.cols; k += kMxBlock) {
    const float s = Chain(p, token, output, k, k + kMxBlock, 0.0f, &scale);
    acc = std::fma(s, scale, acc);
  }
  return acc;
}

}  // namespace

void GemmRef(const GemmParams& p) {
  const int64_t end = std::min(p.panel_end * kPanel, p.w.rows);
  for (int64_t o = p.panel_begin * kPanel; o < end; ++o) {
    for (int64_t t = 0; t < p.tokens; ++t) p.y[t * p.y_stride + o] = Output(p, t, o);
  }
}

}  // namespace deltamesh::kernels

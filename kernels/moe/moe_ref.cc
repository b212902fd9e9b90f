#include <cmath>

#include "kernels/base/math.h"
#include "kernels/moe/moe.h"

namespace deltamesh::kernels {
namespace {

float Situ(const GluParams& p, float g, float u) {
  const float gated = (p.beta * Tanh(g / p.beta)) * Sigmoid(g);
  if (p.linear_beta == 0.0f) return gated * u;
  return gated * (p.linear_beta * Tanh(u / p.linear_beta));
}

}  // namespace

void GluRef(const GluParams& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const float* gate = p.gate + row * p.stride;
    const float* up = p.up + row * p.stride;
    float* y = p.y + row * p.y_stride;
    for (int64_t i = 0; i < p.width; ++i) {
      y[i] = p.activation == Activation::kSilu ? Silu(gate[i]) * up[i] : Situ(p, gate[i], up[i]);
    }
  }
}

void SigmoidGateRef(const SigmoidGateParams& p) {
  for (int64_t i = 0; i < p.count; ++i) p.y[i] = p.x[i] * Sigmoid(p.gate[i]);
}

void CombineRef(const CombineParams& p) {
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t i = 0; i < p.width; ++i) {
      float acc = 0.0f;
      for (int64_t r = 0; r < p.top_k; ++r) {
        acc = std::fma(p.weights[t * p.top_k + r], p.rows[(t * p.top_k + r) * p.width + i], acc);
      }
      p.y[t * p.width + i] = acc;
    }
  }
}

}  // namespace deltamesh::kernels

#include <cmath>

#include "kernels/base/math.h"
#include "kernels/base/types.h"
#include "kernels/norm/norm.h"

namespace deltamesh::kernels {
namespace {

float SumOfSquares(const float* x, int64_t dim) {
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < dim; ++i) lanes[i % kLanes] = std::fma(x[i], x[i], lanes[i % kLanes]);
  return ReduceLanes(lanes);
}

float InverseRms(const float* x, int64_t dim, float eps) {
  return 1.0f / std::sqrt(SumOfSquares(x, dim) / static_cast<float>(dim) + eps);
}

}  // namespace

void RmsNormRef(const RmsNormParams& p) {
  for (int64_t t = 0; t < p.tokens; ++t) {
    const float* x = p.x + t * p.x_stride;
    float* y = p.y + t * p.y_stride;
    const float r = InverseRms(x, p.dim, p.eps);
    for (int64_t i = 0; i < p.dim; ++i) y[i] = (x[i] * r) * p.weight[i];
  }
}

void L2NormRef(const L2NormParams& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    float* x = p.x + row * p.stride;
    const float r = 1.0f / std::sqrt(SumOfSquares(x, p.dim) + p.eps);
    for (int64_t i = 0; i < p.dim; ++i) x[i] = (x[i] * r) * p.scale;
  }
}

void GatedNormRef(const GatedNormParams& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const float* o = p.o + row * p.dim;
    const float* gate = p.gate + row * p.dim;
    float* y = p.y + row * p.dim;
    const float r = InverseRms(o, p.dim, p.eps);
    for (int64_t i = 0; i < p.dim; ++i) y[i] = ((o[i] * r) * p.weight[i]) * Sigmoid(gate[i]);
  }
}

}  // namespace deltamesh::kernels

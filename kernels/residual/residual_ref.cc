#include <cmath>

#include "kernels/base/math.h"
#include "kernels/base/types.h"
#include "kernels/residual/residual.h"

namespace deltamesh::kernels {
namespace {

float Score(const AttnResParams& p, const float* v) {
  float dots[kLanes] = {}, squares[kLanes] = {};
  for (int64_t i = 0; i < p.dim; ++i) {
    const int64_t l = i % kLanes;
    dots[l] = std::fma(v[i], p.weight[i], dots[l]);
    squares[l] = std::fma(v[i], v[i], squares[l]);
  }
  const float mean = ReduceLanes(squares) / static_cast<float>(p.dim);
  return ReduceLanes(dots) * (1.0f / std::sqrt(mean + p.eps));
}

void Softmax(float* p, int64_t count) {
  float largest = p[0], sum = 0.0f;
  for (int64_t j = 1; j < count; ++j) largest = p[j] > largest ? p[j] : largest;
  for (int64_t j = 0; j < count; ++j) {
    p[j] = Exp(p[j] - largest);
    sum += p[j];
  }
  for (int64_t j = 0; j < count; ++j) p[j] = p[j] / sum;
}

}  // namespace

void AddRef(const AddParams& p) {
  for (int64_t i = 0; i < p.count; ++i) p.y[i] += p.x[i];
}

void AttnResRef(const AttnResParams& p) {
  float weights[kMaxSources];
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t j = 0; j < p.count; ++j) weights[j] = Score(p, p.sources[j] + t * p.dim);
    Softmax(weights, p.count);
    for (int64_t i = 0; i < p.dim; ++i) {
      float acc = 0.0f;
      for (int64_t j = 0; j < p.count; ++j) {
        acc = std::fma(weights[j], p.sources[j][t * p.dim + i], acc);
      }
      p.out[t * p.dim + i] = acc;
    }
  }
}

}  // namespace deltamesh::kernels

#include <cmath>

#include "kernels/base/math.h"
#include "kernels/kda/kda.h"

namespace deltamesh::kernels {
namespace {

struct Head {
  float *s, *decay, *khat, *u;
  int64_t dim;
};

void DecayRows(const Head& h, const float* a) {
  for (int64_t d = 0; d < h.dim; ++d) {
    h.decay[d] *= a[d];
    for (int64_t j = 0; j < kTile; ++j) h.khat[d * kTile + j] *= a[d];
  }
}

// weights[j] = chain over ascending d of x[d] * khat[d][j], j < n.
void RowWeights(const Head& h, const float* x, int64_t n, float* weights) {
  for (int64_t j = 0; j < n; ++j) {
    float acc = 0.0f;
    for (int64_t d = 0; d < h.dim; ++d) acc = std::fma(x[d], h.khat[d * kTile + j], acc);
    weights[j] = acc;
  }
}

// The decayed read of S by x, continued over the open rows.
float Read(const Head& h, const float* x, const float* weights, int64_t n, int64_t v) {
  float acc = 0.0f;
  for (int64_t d = 0; d < h.dim; ++d) acc = std::fma(h.decay[d] * x[d], h.s[d * h.dim + v], acc);
  for (int64_t j = 0; j < n; ++j) acc = std::fma(weights[j], h.u[j * h.dim + v], acc);
  return acc;
}

void Fold(const Head& h) {
  for (int64_t d = 0; d < h.dim; ++d) {
    for (int64_t v = 0; v < h.dim; ++v) {
      float acc = h.decay[d] * h.s[d * h.dim + v];
      for (int64_t j = 0; j < kTile; ++j) {
        acc = std::fma(h.khat[d * kTile + j], h.u[j * h.dim + v], acc);
      }
      h.s[d * h.dim + v] = acc;
    }
    h.decay[d] = 1.0f;
    for (int64_t j = 0; j < kTile; ++j) h.khat[d * kTile + j] = 0.0f;
  }
  for (int64_t i = 0; i < kTile * h.dim; ++i) h.u[i] = 0.0f;
}

}  // namespace

void KdaDecayRef(const KdaDecayParams& p) {
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t c = p.head_begin * p.dim; c < p.head_end * p.dim; ++c) {
      const float z = p.z[t * p.z_stride + c] + p.dt_bias[c];
      const float scale = p.a_scale[c / p.dim];
      const float g = p.bounded ? p.lower_bound * Sigmoid(scale * z) : -scale * Softplus(z);
      p.a[t * p.a_stride + c] = Exp(g);
    }
  }
}

void KdaAdvanceRef(const KdaAdvanceParams& p) {
  for (int64_t head = p.head_begin; head < p.head_end; ++head) {
    const Head h = {.s = p.state.s + head * p.dim * p.dim,
                    .decay = p.state.decay + head * p.dim,
                    .khat = p.state.khat + head * p.dim * kTile,
                    .u = p.state.u + head * kTile * p.dim,
                    .dim = p.dim};
    int64_t n = p.open_rows;
    for (int64_t t = 0; t < p.tokens; ++t) {
      const int64_t at = t * p.stride + head * p.dim;
      const float *q = p.q + at, *k = p.k + at, *v = p.v + at;
      const float beta = p.beta[t * p.beta_stride + head];
      float weights[kTile];
      DecayRows(h, p.a + at);
      RowWeights(h, k, n, weights);
      for (int64_t i = 0; i < p.dim; ++i) {
        h.u[n * p.dim + i] = beta * (v[i] - Read(h, k, weights, n, i));
      }
      for (int64_t d = 0; d < p.dim; ++d) h.khat[d * kTile + n] = k[d];
      ++n;
      RowWeights(h, q, n, weights);
      float* o = p.o + t * p.o_stride + head * p.dim;
      for (int64_t i = 0; i < p.dim; ++i) o[i] = Read(h, q, weights, n, i);
      if (n == kTile) {
        Fold(h);
        n = 0;
      }
    }
  }
}

}  // namespace deltamesh::kernels

#include <cmath>

#include "kernels/gemm/gemm.h"

namespace deltamesh::kernels {

void GemmRef(const GemmParams& p) {
  const int64_t row_begin = p.panel_begin * kPanel;
  const int64_t row_end = p.panel_end * kPanel < p.w.rows ? p.panel_end * kPanel : p.w.rows;
  for (int64_t o = row_begin; o < row_end; ++o) {
    for (int64_t t = 0; t < p.tokens; ++t) p.y[t * p.y_stride + o] = 0.0f;
    for (int64_t k = 0; k < p.w.cols; ++k) {
      const float w = UnpackOne(p.w, o, k);
      for (int64_t t = 0; t < p.tokens; ++t) {
        float& acc = p.y[t * p.y_stride + o];
        acc = std::fma(p.x[t * p.x_stride + k], w, acc);
      }
    }
  }
}

}  // namespace deltamesh::kernels

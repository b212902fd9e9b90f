#include "runtime/model/rows.h"

#include "kernels/moe/moe.h"
#include "kernels/norm/norm.h"
#include "kernels/residual/residual.h"
#include "runtime/model/project.h"

namespace deltamesh {

void NormRows(ThreadPool& pool, int64_t rows, int64_t dim, const float* x, const float* weight,
              float eps, float* y) {
  pool.ParallelFor(rows, RowGrain(2 * dim), [&](int64_t begin, int64_t end) {
    kernels::RmsNorm({.x = x + begin * dim,
                      .x_stride = dim,
                      .weight = weight,
                      .eps = eps,
                      .y = y + begin * dim,
                      .y_stride = dim,
                      .tokens = end - begin,
                      .dim = dim});
  });
}

void AddRows(ThreadPool& pool, int64_t rows, int64_t dim, const float* x, float* y) {
  pool.ParallelFor(rows, RowGrain(dim), [&](int64_t begin, int64_t end) {
    kernels::Add({.x = x + begin * dim, .y = y + begin * dim, .count = (end - begin) * dim});
  });
}

void GateRows(ThreadPool& pool, int64_t rows, int64_t dim, float* x, const float* gate) {
  pool.ParallelFor(rows, RowGrain(16 * dim), [&](int64_t begin, int64_t end) {
    kernels::SigmoidGate({.x = x + begin * dim,
                          .gate = gate + begin * dim,
                          .y = x + begin * dim,
                          .count = (end - begin) * dim});
  });
}

}  // namespace deltamesh

#include "runtime/model/project.h"

#include <algorithm>

namespace deltamesh {

namespace {
// Below this many multiply-adds waking a thread costs more than it saves.
constexpr int64_t kMinWork = 64 * 1024;
}  // namespace

int64_t RowGrain(int64_t row_cost) {
  return std::max<int64_t>(1, kMinWork / std::max<int64_t>(1, row_cost));
}

void Project(ThreadPool& pool, int64_t tokens, std::span<const Projection> projections) {
  int64_t panels = 0, work = 0;
  for (const Projection& p : projections) {
    panels += p.w.panels();
    work += p.w.panels() * p.w.cols * kernels::kPanel * tokens;
  }
  if (panels == 0) return;
  pool.ParallelFor(panels, RowGrain(work / panels), [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // number of the projection's first panel
    for (const Projection& p : projections) {
      const int64_t b = std::max(begin, first) - first;
      const int64_t e = std::min(end, first + p.w.panels()) - first;
      if (b < e) {
        kernels::Gemm({.x = p.x,
                       .x_stride = p.x_stride,
                       .w = p.w,
                       .y = p.y,
                       .y_stride = p.y_stride,
                       .tokens = tokens,
                       .panel_begin = b,
                       .panel_end = e});
      }
      first += p.w.panels();
    }
  });
}

void Project(ThreadPool& pool, int64_t tokens, const float* x, const kernels::PackedMatrix& w,
             float* y) {
  const Projection one{x, w.cols, w, y, w.rows};
  Project(pool, tokens, {&one, 1});
}

}  // namespace deltamesh

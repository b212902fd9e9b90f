// Matrix products of one step, split over its pool by output panels. Inputs that a step wants quantised are
// quantised once per call, also when several matrices share them.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/gemm/gemm.h"
#include "runtime/model/step.h"

namespace deltamesh {

// y = x * W^T.
struct Projection {
  const float* x;  // [tokens, w.cols], x_stride floats between rows
  int64_t x_stride;
  kernels::PackedMatrix w;
  float* y;  // [tokens, w.rows], y_stride floats between rows
  int64_t y_stride;
};

// Computes independent projections as one job, so that small ones do not each wait for all threads. Those
// that share an input should be neighbours.
void Project(const Step& step, int64_t tokens, std::span<const Projection> projections);

// One projection with dense rows on both sides.
void Project(const Step& step, int64_t tokens, const float* x, const kernels::PackedMatrix& w,
             float* y);

// Rows worth handing to a thread when one row costs about `row_cost` multiply-adds.
int64_t RowGrain(int64_t row_cost);

}  // namespace deltamesh

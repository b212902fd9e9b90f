// Row-wise operations of a step, split over its pool. A row's result never depends on the others.
#pragma once

#include <cstdint>

#include "runtime/base/thread_pool.h"

namespace deltamesh {

// y[t] = rms norm of x[t]; both [rows, dim] dense; y may be x.
void NormRows(ThreadPool& pool, int64_t rows, int64_t dim, const float* x, const float* weight,
              float eps, float* y);

// y += x over [rows, dim].
void AddRows(ThreadPool& pool, int64_t rows, int64_t dim, const float* x, float* y);

// x = x * sigmoid(gate) over [rows, dim].
void GateRows(ThreadPool& pool, int64_t rows, int64_t dim, float* x, const float* gate);

}  // namespace deltamesh

// The vector functions of kernels/base/math-inl.h over arrays, on the target in use.
#pragma once

#include <cstdint>

namespace deltamesh::kernels {

enum class MathFunction { kExp, kSigmoid, kTanh, kSoftplus, kSilu };

// y[i] = f(x[i]), i < count.
void MathSimd(MathFunction f, const float* x, float* y, int64_t count);
// The same by the scalar functions of kernels/base/math.h.
void MathScalar(MathFunction f, const float* x, float* y, int64_t count);

// Signed values of MXFP4 codes 0..15, through 4 lanes: the path of targets without a table lookup.
void MxValuesOfFourLanes(float* values /*[16]*/);

}  // namespace deltamesh::kernels

#include "tests/parity/math_simd.h"

#include "kernels/base/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/parity/math_simd.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/base/lanes-inl.h"
#include "kernels/base/math-inl.h"
#include "kernels/gemm/mxfp4-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

HWY_INLINE VF Apply(MathFunction f, VF x) {
  const DF d;
  switch (f) {
    case MathFunction::kExp:
      return Exp(d, x);
    case MathFunction::kSigmoid:
      return Sigmoid(d, x);
    case MathFunction::kTanh:
      return Tanh(d, x);
    case MathFunction::kSoftplus:
      return Softplus(d, x);
    default:
      return Silu(d, x);
  }
}

void MathSimdOf(MathFunction f, const float* x, float* y, int64_t count) {
  ForVectors(0, count, [&](int64_t i, int64_t n) HWY_ATTR {
    StoreUpTo(Apply(f, LoadUpTo(x + i, n)), y + i, n);
  });
}

void MxValuesOf(float* values) {
  const hn::CappedTag<float, 4> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  // Low nibbles 0..3, 4..7 in columns 0 and 3, high ones 8..11, 12..15 in columns 1 and 2.
  const auto lanes =
      hn::Add(hn::Set(du, 0x04C08000u), hn::Mul(hn::Iota(du, 0), hn::Set(du, 0x01101001u)));
  const auto store = [&](auto value, float* out)
                         HWY_ATTR { hn::StoreU(hn::Mul(value, hn::Set(d, 0x1p-25f)), d, out); };
  store(MxDecode<0, 0>(d, lanes), values);
  store(MxDecode<3, 0>(d, lanes), values + 4);
  store(MxDecode<1, 1>(d, lanes), values + 8);
  store(MxDecode<2, 1>(d, lanes), values + 12);
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltamesh::kernels {

HWY_EXPORT(MathSimdOf);
HWY_EXPORT(MxValuesOf);

void MathSimd(MathFunction f, const float* x, float* y, int64_t count) {
  HWY_DYNAMIC_DISPATCH(MathSimdOf)(f, x, y, count);
}

void MxValuesOfFourLanes(float* values) { HWY_DYNAMIC_DISPATCH(MxValuesOf)(values); }

void MathScalar(MathFunction f, const float* x, float* y, int64_t count) {
  float (*const functions[])(float) = {Exp, Sigmoid, Tanh, Softplus, Silu};
  for (int64_t i = 0; i < count; ++i) y[i] = functions[static_cast<int>(f)](x[i]);
}

}  // namespace deltamesh::kernels
#endif  // HWY_ONCE

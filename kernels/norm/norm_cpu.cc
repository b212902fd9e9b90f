#include <cmath>

#include "kernels/base/simd_targets.h"
#include "kernels/norm/norm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/norm/norm_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/base/lanes-inl.h"
#include "kernels/base/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

HWY_INLINE float SumOfSquares(const float* x, int64_t dim) {
  Lanes lanes;
  LaneDot(x, x, dim, lanes);
  return Reduce(lanes);
}

HWY_INLINE float InverseRms(const float* x, int64_t dim, float eps) {
  return 1.0f / std::sqrt(SumOfSquares(x, dim) / static_cast<float>(dim) + eps);
}

void RmsNormCpu(const RmsNormParams& p) {
  for (int64_t t = 0; t < p.tokens; ++t) {
    const float* x = p.x + t * p.x_stride;
    float* y = p.y + t * p.y_stride;
    const VF r = hn::Set(DF(), InverseRms(x, p.dim, p.eps));
    ForVectors(0, p.dim, [&](int64_t i, int64_t count) HWY_ATTR {
      const VF scaled = hn::Mul(LoadUpTo(x + i, count), r);
      StoreUpTo(hn::Mul(scaled, LoadUpTo(p.weight + i, count)), y + i, count);
    });
  }
}

void L2NormCpu(const L2NormParams& p) {
  const VF scale = hn::Set(DF(), p.scale);
  for (int64_t row = 0; row < p.rows; ++row) {
    float* x = p.x + row * p.stride;
    const VF r = hn::Set(DF(), 1.0f / std::sqrt(SumOfSquares(x, p.dim) + p.eps));
    ForVectors(0, p.dim, [&](int64_t i, int64_t count) HWY_ATTR {
      StoreUpTo(hn::Mul(hn::Mul(LoadUpTo(x + i, count), r), scale), x + i, count);
    });
  }
}

void GatedNormCpu(const GatedNormParams& p) {
  for (int64_t row = 0; row < p.rows; ++row) {
    const float* o = p.o + row * p.dim;
    const float* gate = p.gate + row * p.dim;
    float* y = p.y + row * p.dim;
    const VF r = hn::Set(DF(), InverseRms(o, p.dim, p.eps));
    ForVectors(0, p.dim, [&](int64_t i, int64_t count) HWY_ATTR {
      const VF scaled = hn::Mul(LoadUpTo(o + i, count), r);
      const VF normed = hn::Mul(scaled, LoadUpTo(p.weight + i, count));
      StoreUpTo(hn::Mul(normed, Sigmoid(DF(), LoadUpTo(gate + i, count))), y + i, count);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltamesh::kernels {

HWY_EXPORT(RmsNormCpu);
HWY_EXPORT(L2NormCpu);
HWY_EXPORT(GatedNormCpu);

void RmsNorm(const RmsNormParams& p) { HWY_DYNAMIC_DISPATCH(RmsNormCpu)(p); }
void L2Norm(const L2NormParams& p) { HWY_DYNAMIC_DISPATCH(L2NormCpu)(p); }
void GatedNorm(const GatedNormParams& p) { HWY_DYNAMIC_DISPATCH(GatedNormCpu)(p); }

}  // namespace deltamesh::kernels
#endif  // HWY_ONCE

#include <cmath>

#include "kernels/base/simd_targets.h"
#include "kernels/residual/residual.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/residual/residual_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/base/lanes-inl.h"
#include "kernels/base/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

HWY_INLINE float Score(const AttnResParams& p, const float* v) {
  Lanes dots, squares;
  LaneDot(v, p.weight, p.dim, dots);
  LaneDot(v, v, p.dim, squares);
  const float mean = Reduce(squares) / static_cast<float>(p.dim);
  return Reduce(dots) * (1.0f / std::sqrt(mean + p.eps));
}

// A few values, and a sum in ascending order: scalar, by the scalar twin of the exponential.
HWY_INLINE void Softmax(float* p, int64_t count) {
  float largest = p[0], sum = 0.0f;
  for (int64_t j = 1; j < count; ++j) largest = p[j] > largest ? p[j] : largest;
  for (int64_t j = 0; j < count; ++j) {
    p[j] = kernels::Exp(p[j] - largest);
    sum += p[j];
  }
  for (int64_t j = 0; j < count; ++j) p[j] = p[j] / sum;
}

void AttnResCpu(const AttnResParams& p) {
  const DF d;
  float weights[kMaxSources];
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t j = 0; j < p.count; ++j) weights[j] = Score(p, p.sources[j] + t * p.dim);
    Softmax(weights, p.count);
    ForVectors(0, p.dim, [&](int64_t i, int64_t count) HWY_ATTR {
      VF acc = hn::Zero(d);
      for (int64_t j = 0; j < p.count; ++j) {
        const VF v = LoadUpTo(p.sources[j] + t * p.dim + i, count);
        acc = hn::MulAdd(hn::Set(d, weights[j]), v, acc);
      }
      StoreUpTo(acc, p.out + t * p.dim + i, count);
    });
  }
}

void AddCpu(const AddParams& p) {
  ForVectors(0, p.count, [&](int64_t i, int64_t count) HWY_ATTR {
    StoreUpTo(hn::Add(LoadUpTo(p.y + i, count), LoadUpTo(p.x + i, count)), p.y + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltamesh::kernels {

HWY_EXPORT(AddCpu);
HWY_EXPORT(AttnResCpu);

void Add(const AddParams& p) { HWY_DYNAMIC_DISPATCH(AddCpu)(p); }
void AttnRes(const AttnResParams& p) { HWY_DYNAMIC_DISPATCH(AttnResCpu)(p); }

}  // namespace deltamesh::kernels
#endif  // HWY_ONCE

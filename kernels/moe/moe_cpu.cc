#include "kernels/base/simd_targets.h"
#include "kernels/moe/moe.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/moe/moe_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/base/lanes-inl.h"
#include "kernels/base/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

HWY_INLINE VF Situ(VF g, VF u, VF beta, VF linear_beta, bool linear) {
  const DF d;
  const VF bounded = hn::Mul(beta, Tanh(d, hn::Div(g, beta)));
  const VF gated = hn::Mul(bounded, Sigmoid(d, g));
  if (linear) return hn::Mul(gated, u);
  return hn::Mul(gated, hn::Mul(linear_beta, Tanh(d, hn::Div(u, linear_beta))));
}

void GluCpu(const GluParams& p) {
  const DF d;
  const VF beta = hn::Set(d, p.beta), linear_beta = hn::Set(d, p.linear_beta);
  const bool linear = p.linear_beta == 0.0f;
  for (int64_t row = 0; row < p.rows; ++row) {
    const float* gate = p.gate + row * p.stride;
    const float* up = p.up + row * p.stride;
    float* y = p.y + row * p.y_stride;
    ForVectors(0, p.width, [&](int64_t i, int64_t count) HWY_ATTR {
      const VF g = LoadUpTo(gate + i, count), u = LoadUpTo(up + i, count);
      const VF act = p.activation == Activation::kSilu ? hn::Mul(Silu(d, g), u)
                                                       : Situ(g, u, beta, linear_beta, linear);
      StoreUpTo(act, y + i, count);
    });
  }
}

void SigmoidGateCpu(const SigmoidGateParams& p) {
  const DF d;
  ForVectors(0, p.count, [&](int64_t i, int64_t count) HWY_ATTR {
    const VF gate = Sigmoid(d, LoadUpTo(p.gate + i, count));
    StoreUpTo(hn::Mul(LoadUpTo(p.x + i, count), gate), p.y + i, count);
  });
}

void CombineCpu(const CombineParams& p) {
  const DF d;
  for (int64_t t = 0; t < p.tokens; ++t) {
    const float* weights = p.weights + t * p.top_k;
    const float* rows = p.rows + t * p.top_k * p.width;
    ForVectors(0, p.width, [&](int64_t i, int64_t count) HWY_ATTR {
      VF acc = hn::Zero(d);
      for (int64_t r = 0; r < p.top_k; ++r) {
        acc = hn::MulAdd(hn::Set(d, weights[r]), LoadUpTo(rows + r * p.width + i, count), acc);
      }
      StoreUpTo(acc, p.y + t * p.width + i, count);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltamesh::kernels {

HWY_EXPORT(GluCpu);
HWY_EXPORT(SigmoidGateCpu);
HWY_EXPORT(CombineCpu);

void Glu(const GluParams& p) { HWY_DYNAMIC_DISPATCH(GluCpu)(p); }
void SigmoidGate(const SigmoidGateParams& p) { HWY_DYNAMIC_DISPATCH(SigmoidGateCpu)(p); }
void Combine(const CombineParams& p) { HWY_DYNAMIC_DISPATCH(CombineCpu)(p); }

}  // namespace deltamesh::kernels
#endif  // HWY_ONCE

// Chooses among the ways to multiply by the number of tokens.
#include "kernels/base/simd_targets.h"
#include "kernels/gemm/gemm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gemm/gemm_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/gemm/block-inl.h"
#include "kernels/gemm/fused-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {

template <class Rows>
HWY_INLINE void GemmOf(const GemmParams& p) {
  if (p.tokens <= kFusedTokens) return Fused<Rows>(p);
  Blocks<Rows>(p);
}

void GemmCpu(const GemmParams& p) {
  switch (p.w.format) {
    case WeightFormat::kF32:
      return GemmOf<F32Rows>(p);
    case WeightFormat::kBf16:
      return GemmOf<Bf16Rows>(p);
    case WeightFormat::kMxfp4:
      return GemmOf<MxRows>(p);
    case WeightFormat::kInt8:
      return GemmOf<Int8Rows>(p);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltamesh::kernels {

HWY_EXPORT(GemmCpu);

void Gemm(const GemmParams& p) { HWY_DYNAMIC_DISPATCH(GemmCpu)(p); }

}  // namespace deltamesh::kernels
#endif  // HWY_ONCE

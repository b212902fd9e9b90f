#include "kernels/base/simd_targets.h"
#include "kernels/gemm/int8_activations.h"
#include "kernels/gemm/int8_probe.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gemm/int8_probe_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/gemm/int8_ops-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {

// As many chains as hide the latency and leave registers for what is added now and then.
template <class Ops, int kChains>
double ProductsOf(int64_t rounds, float* sink) {
  VI sum[kChains], w[Ops::kW], x[Ops::kX];
  for (VI& v : sum) v = hn::Zero(DI());
  const int8_t codes[4] = {1, -1, 1, -1};
  Ops::Split(hn::Set(DI(), 0x01010101), w);
  Ops::Spread(codes, x);
  for (int64_t r = 0; r < rounds; ++r) {
    VI acc[kChains];
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) acc[i] = Ops::Begin(sum[i]);
#pragma GCC unroll 8
    for (int n = 0; n < Ops::kRun; ++n) {
#pragma GCC unroll 12
      for (int i = 0; i < kChains; ++i) {
#if HWY_ARCH_X86
        asm volatile("" : "+x"(w[0].raw));  // else equal products would be computed once
        if constexpr (Ops::kW == 2) asm volatile("" : "+x"(w[1].raw));
#else
        w[0] = hn::Add(w[0], x[0]);
#endif
        acc[i] = Ops::Dot(acc[i], w, x);
      }
    }
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sum[i] = Ops::Fold(sum[i], acc[i]);
  }
  VI all = sum[0];
  for (int i = 1; i < kChains; ++i) all = hn::Add(all, sum[i]);
  *sink = static_cast<float>(hn::GetLane(all));
  return static_cast<double>(rounds) * kChains * Ops::kRun * 4 * 2 * kWidth;
}

double Int8Cpu(int64_t rounds, bool mxfp4, float* sink) {
#if HWY_ARCH_X86
  if (HasByteProducts(kWidth == 16)) return ProductsOf<ByteOps, 12>(rounds / 8, sink);
  return mxfp4 ? ProductsOf<SmallOps, 6>(rounds / 8, sink)
               : ProductsOf<WordOps, 8>(rounds / 8, sink);
#else
  (void)mxfp4;
  return ProductsOf<LaneOps, 8>(rounds / 8, sink);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltamesh::kernels {

HWY_EXPORT(Int8Cpu);

double Int8Probe(int64_t rounds, bool mxfp4, float* sink) {
  return HWY_DYNAMIC_DISPATCH(Int8Cpu)(rounds, mxfp4, sink);
}

}  // namespace deltamesh::kernels
#endif  // HWY_ONCE

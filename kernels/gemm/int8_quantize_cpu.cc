#include <bit>
#include <cstring>

#include "kernels/base/simd_targets.h"
#include "kernels/gemm/int8_activations.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gemm/int8_quantize_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 16>;
using DI = hn::RebindToSigned<DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
constexpr int kWidth = static_cast<int>(hn::MaxLanes(DF()));
constexpr int kVecs = static_cast<int>(kMxBlock) / kWidth;  // registers of a block

// Magnitudes of floats compare as their bits do, and NaN is above all of them.
HWY_INLINE void QuantizeBlock(const float* x, int8_t* codes, float* scale, int32_t* offset) {
  const DF df;
  const DI di;
  const hn::Rebind<int8_t, DF> d8;
  constexpr int32_t kInfinity = 0x7F800000;
  VF values[kVecs];
  VI top = hn::Zero(di);
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) {
    values[v] = hn::LoadU(df, x + v * kWidth);
    top = hn::Max(top, hn::And(hn::BitCast(di, values[v]), hn::Set(di, 0x7FFFFFFF)));
  }
  const int32_t bits = hn::GetLane(hn::MaxOfLanes(di, top));
  const float amax = std::bit_cast<float>(bits);
  if (bits >= kInfinity || amax < kInt8Least) {
    std::memset(codes, 0, kMxBlock);
    *scale = bits >= kInfinity ? std::bit_cast<float>(0x7FC00000) : 0.0f;
    *offset = 0;
    return;
  }
  *scale = amax / 127.0f;
  const VF inverse = hn::Set(df, 127.0f / amax);
  VI sum = hn::Zero(di);
#pragma GCC unroll 8
  for (int v = 0; v < kVecs; ++v) {
    const VI code = hn::NearestInt(hn::Mul(values[v], inverse));
    sum = hn::Add(sum, code);
    hn::StoreU(hn::DemoteTo(d8, code), d8, codes + v * kWidth);
  }
  *offset = -128 * hn::GetLane(hn::SumOfLanes(di, sum));
}

void QuantizeRowsCpu(const QuantizeParams& p) {
  const int64_t blocks = p.cols / kMxBlock;
  for (int64_t t = 0; t < p.tokens; ++t) {
    std::byte* row = p.rows + t * Int8RowBytes(p.cols);
    auto* codes = reinterpret_cast<int8_t*>(row);
    auto* scales = reinterpret_cast<float*>(row + p.cols);
    auto* offsets = reinterpret_cast<int32_t*>(scales + blocks);
    for (int64_t b = p.block_begin; b < p.block_end; ++b) {
      QuantizeBlock(p.x + t * p.x_stride + b * kMxBlock, codes + b * kMxBlock, scales + b,
                    offsets + b);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltamesh::kernels {

HWY_EXPORT(QuantizeRowsCpu);

void QuantizeRows(const QuantizeParams& p) { HWY_DYNAMIC_DISPATCH(QuantizeRowsCpu)(p); }

}  // namespace deltamesh::kernels
#endif  // HWY_ONCE

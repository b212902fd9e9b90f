// Exact floats of MXFP4 codes. Included once per Highway target.
#if defined(DELTAMESH_KERNELS_GEMM_MXFP4_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTAMESH_KERNELS_GEMM_MXFP4_INL_H_
#undef DELTAMESH_KERNELS_GEMM_MXFP4_INL_H_
#else
#define DELTAMESH_KERNELS_GEMM_MXFP4_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

alignas(64) inline constexpr float kMxValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,
                                                    4.0f,  6.0f,  0.0f,  -0.5f, -1.0f, -1.5f,
                                                    -2.0f, -3.0f, -4.0f, -6.0f};

// Signed values of codes 0..15; minus zero is zero.
template <class D, class VU = hn::Vec<hn::RebindToUnsigned<D>>>
HWY_INLINE hn::Vec<D> MxDecode(D d, VU codes) {
  const hn::RebindToUnsigned<D> du;
  constexpr size_t kWidth = hn::MaxLanes(D());
  if constexpr (kWidth == 16) {
    return hn::TableLookupLanes(hn::Load(d, kMxValues), hn::IndicesFromVec(d, codes));
  } else {
    // From 2 on the code is the top of a float's exponent and significand; 1 is one half.
    const auto magnitude = hn::And(codes, hn::Set(du, 7u));
    const auto normal = hn::Add(hn::ShiftLeft<22>(magnitude), hn::Set(du, 126u << 23));
    const auto half =
        hn::IfThenElseZero(hn::Eq(magnitude, hn::Set(du, 1u)), hn::Set(du, 126u << 23));
    const auto value = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 1u)), normal, half);
    const auto sign = hn::ShiftLeft<28>(hn::AndNot(hn::Set(du, 7u), codes));
    const auto nonzero = hn::Gt(magnitude, hn::Zero(du));
    return hn::BitCast(d, hn::Or(value, hn::IfThenElseZero(nonzero, sign)));
  }
}

// Twice the values, as signed bytes.
alignas(16) inline constexpr uint8_t kMxDoubled[16] = {0, 1,   2,   3,   4,   6,   8,   12,
                                                       0, 255, 254, 253, 252, 250, 248, 244};
// Bytes 8 v + l of a 16-byte row to the top of 32-bit lane l; zeros below.
alignas(32) inline constexpr uint8_t kMxPick[2][32] = {
    {128, 128, 128, 0, 128, 128, 128, 1, 128, 128, 128, 2, 128, 128, 128, 3,
     128, 128, 128, 4, 128, 128, 128, 5, 128, 128, 128, 6, 128, 128, 128, 7},
    {128, 128, 128, 8,  128, 128, 128, 9,  128, 128, 128, 10, 128, 128, 128, 11,
     128, 128, 128, 12, 128, 128, 128, 13, 128, 128, 128, 14, 128, 128, 128, 15}};

// For registers of eight lanes, four of w: the row's low nibbles into w[0], w[1], its high ones
// into w[2], w[3], as floats twice their value.
template <class D, class V = hn::Vec<D>>
HWY_INLINE void MxDoubledRow(D d, const uint8_t* row, V* w) {
  const hn::Repartition<uint8_t, D> d8;
  const hn::RebindToSigned<D> di;
  const auto pairs = hn::LoadDup128(d8, row);
  const auto values = hn::LoadDup128(d8, kMxDoubled);
  const auto nibble = hn::Set(d8, uint8_t{15});
  const auto low = hn::TableLookupBytes(values, hn::And(pairs, nibble));
  const auto high = hn::TableLookupBytes(values, hn::And(hn::ShiftRight<4>(pairs), nibble));
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const auto pick = hn::Load(d8, kMxPick[v]);
    const auto a = hn::BitCast(di, hn::TableLookupBytesOr0(low, pick));
    const auto b = hn::BitCast(di, hn::TableLookupBytesOr0(high, pick));
    w[v] = hn::ConvertTo(d, hn::ShiftRight<24>(a));
    w[v + 2] = hn::ConvertTo(d, hn::ShiftRight<24>(b));
  }
}

// Scales 2^(code - 127) of the bytes at p; code 0 is the subnormal 2^-127.
template <class D>
HWY_INLINE hn::Vec<D> MxScales(D d, const uint8_t* p) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint8_t, D> d8;
  const auto codes = hn::PromoteTo(du, hn::LoadU(d8, p));
  const auto zero = hn::Eq(codes, hn::Zero(du));
  return hn::BitCast(d, hn::IfThenElse(zero, hn::Set(du, 0x00400000u), hn::ShiftLeft<23>(codes)));
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard

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
                                                    4.0f,  6.0f,  -0.0f, -0.5f, -1.0f, -1.5f,
                                                    -2.0f, -3.0f, -4.0f, -6.0f};

// Signed values of codes 0..15.
template <class D, class VU = hn::Vec<hn::RebindToUnsigned<D>>>
HWY_INLINE hn::Vec<D> MxDecode(D d, VU codes) {
  const hn::RebindToUnsigned<D> du;
  constexpr size_t kWidth = hn::MaxLanes(D());
  if constexpr (kWidth == 16) {
    return hn::TableLookupLanes(hn::Load(d, kMxValues), hn::IndicesFromVec(d, codes));
  } else {
    const auto magnitude = hn::And(codes, hn::Set(du, 7u));
    const auto sign = hn::ShiftLeft<28>(hn::AndNot(hn::Set(du, 7u), codes));
    if constexpr (kWidth == 8) {
      const auto value =
          hn::TableLookupLanes(hn::Load(d, kMxValues), hn::IndicesFromVec(d, magnitude));
      return hn::Or(value, hn::BitCast(d, sign));
    } else {
      // From 2 on the code is the top of a float's exponent and significand; 1 is one half.
      const auto normal = hn::Add(hn::ShiftLeft<22>(magnitude), hn::Set(du, 126u << 23));
      const auto half =
          hn::IfThenElseZero(hn::Eq(magnitude, hn::Set(du, 1u)), hn::Set(du, 126u << 23));
      const auto value = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 1u)), normal, half);
      return hn::BitCast(d, hn::Or(value, sign));
    }
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

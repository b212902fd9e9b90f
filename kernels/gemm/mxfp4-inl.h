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

// Twice the values, as signed bytes.
alignas(16) inline constexpr uint8_t kMxDoubled[16] = {0, 1,   2,   3,   4,   6,   8,   12,
                                                       0, 255, 254, 253, 252, 250, 248, 244};
// Byte i of every 32-bit lane to its top, zeros below.
alignas(16) inline constexpr uint8_t kTopByte[4][16] = {
    {128, 128, 128, 0, 128, 128, 128, 4, 128, 128, 128, 8, 128, 128, 128, 12},
    {128, 128, 128, 1, 128, 128, 128, 5, 128, 128, 128, 9, 128, 128, 128, 13},
    {128, 128, 128, 2, 128, 128, 128, 6, 128, 128, 128, 10, 128, 128, 128, 14},
    {128, 128, 128, 3, 128, 128, 128, 7, 128, 128, 128, 11, 128, 128, 128, 15}};

// Signed byte kColumn of every lane times 2^24, exact.
template <int kColumn, class D, class VU>
HWY_INLINE hn::Vec<D> TopByteFloat(D d, VU lanes) {
  const hn::Repartition<uint8_t, D> d8;
  const hn::RebindToSigned<D> di;
  const auto pick = hn::LoadDup128(d8, kTopByte[kColumn]);
  const auto top = hn::TableLookupBytesOr0(hn::BitCast(d8, lanes), pick);
  return hn::ConvertTo(d, hn::BitCast(di, top));
}

// Of a row's lanes the values of column kColumn, minus zero being zero: of the low nibbles if
// kHalf is 0, else of the high ones. Sixteen lanes look the values up.
template <int kColumn, int kHalf, class D, class VU = hn::Vec<hn::RebindToUnsigned<D>>>
HWY_INLINE hn::Vec<D> MxDecode(D d, VU lanes) {
  constexpr int kShift = 8 * kColumn + 4 * kHalf;
  if constexpr (hn::MaxLanes(D()) == 16) {
    const hn::RebindToUnsigned<D> du;
    const auto codes = hn::And(hn::ShiftRight<kShift>(lanes), hn::Set(du, 15u));
    return hn::TableLookupLanes(hn::Load(d, kMxValues), hn::IndicesFromVec(d, codes));
  } else {
    const hn::Repartition<uint8_t, D> d8;
    const auto pairs = hn::BitCast(d8, hn::ShiftRight<4 * kHalf>(lanes));
    const auto codes = hn::And(pairs, hn::Set(d8, uint8_t{15}));
    const auto doubled = hn::TableLookupBytes(hn::LoadDup128(d8, kMxDoubled), codes);
    return hn::Mul(TopByteFloat<kColumn>(d, doubled), hn::Set(d, 0x1p-25f));
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

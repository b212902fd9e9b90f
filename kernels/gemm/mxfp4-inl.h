// Exact floats of packed codes, with the factors of gemm.h. Included once per Highway target.
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

// 2^25 times the values of codes 0..15; minus zero is zero.
alignas(64) inline constexpr float kMxValues[16] = {
    0, 0x1p24f,  0x1p25f,  0x3p24f,  0x1p26f,  0x3p25f,  0x1p27f,  0x3p26f,
    0, -0x1p24f, -0x1p25f, -0x3p24f, -0x1p26f, -0x3p25f, -0x1p27f, -0x3p26f};

// Twice the values, as signed bytes.
alignas(16) inline constexpr uint8_t kMxDoubled[16] = {0, 1,   2,   3,   4,   6,   8,   12,
                                                       0, 255, 254, 253, 252, 250, 248, 244};

// Byte i of every 32-bit lane to its top, zeros below.
alignas(16) inline constexpr uint8_t kTopByte[4][16] = {
    {128, 128, 128, 0, 128, 128, 128, 4, 128, 128, 128, 8, 128, 128, 128, 12},
    {128, 128, 128, 1, 128, 128, 128, 5, 128, 128, 128, 9, 128, 128, 128, 13},
    {128, 128, 128, 2, 128, 128, 128, 6, 128, 128, 128, 10, 128, 128, 128, 14},
    {128, 128, 128, 3, 128, 128, 128, 7, 128, 128, 128, 11, 128, 128, 128, 15}};

// 2^24 times the signed byte kColumn of every lane.
template <int kColumn, class D, class VU>
HWY_INLINE hn::Vec<D> TopByteFloat(D d, VU lanes) {
  const hn::Repartition<uint8_t, D> d8;
  const hn::RebindToSigned<D> di;
  const auto pick = hn::LoadDup128(d8, kTopByte[kColumn]);
  const auto top = hn::TableLookupBytesOr0(hn::BitCast(d8, lanes), pick);
  return hn::ConvertTo(d, hn::BitCast(di, top));
}

// 2^25 times the values of column kColumn of a row's lanes: of the low nibbles if kHalf is 0, else
// of the high ones.
template <int kColumn, int kHalf, class D, class VU = hn::Vec<hn::RebindToUnsigned<D>>>
HWY_INLINE hn::Vec<D> MxDecode(D d, VU lanes) {
#if HWY_TARGET <= HWY_AVX3
  if constexpr (hn::MaxLanes(D()) == 16) {
    // The lookup takes the lowest four bits of a lane and ignores the others.
    const auto codes = hn::ShiftRight<8 * kColumn + 4 * kHalf>(lanes);
    return hn::TableLookupLanes(hn::Load(d, kMxValues), hn::Indices512<float>{codes.raw});
  }
#endif
  const hn::Repartition<uint8_t, D> d8;
  const auto pairs = hn::BitCast(d8, hn::ShiftRight<4 * kHalf>(lanes));
  const auto codes = hn::And(pairs, hn::Set(d8, uint8_t{15}));
  return TopByteFloat<kColumn>(d, hn::TableLookupBytes(hn::LoadDup128(d8, kMxDoubled), codes));
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

// The scales that go with MxDecode: 2^(code - 152), but zero for codes up to 25.
template <class D>
HWY_INLINE hn::Vec<D> MxDecodeScales(D d, const uint8_t* p) {
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint8_t, D> d8;
  const auto codes = hn::PromoteTo(du, hn::LoadU(d8, p));
  const auto least = hn::Set(du, 25u);
  return hn::BitCast(d, hn::ShiftLeft<23>(hn::Sub(hn::Max(codes, least), least)));
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard

// How each instruction set multiplies bytes, for int8_cpu.cc. Included once per Highway target.
#if defined(DELTAMESH_KERNELS_GEMM_INT8_OPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTAMESH_KERNELS_GEMM_INT8_OPS_INL_H_
#undef DELTAMESH_KERNELS_GEMM_INT8_OPS_INL_H_
#else
#define DELTAMESH_KERNELS_GEMM_INT8_OPS_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"
#include "kernels/base/types.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 16>;
using DI = hn::RebindToSigned<DF>;
using D8 = hn::Repartition<uint8_t, DF>;
using V8 = hn::Vec<D8>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;  // 32-bit lanes, or the four bytes in each
constexpr int kWidth = static_cast<int>(hn::MaxLanes(DF()));
constexpr int kVecs = static_cast<int>(kPanel) / kWidth;  // registers of a panel
constexpr int kRows = static_cast<int>(kMxBlock) / 4;     // rows of four columns in a block

// How an instruction set multiplies four weight bytes of each lane by four codes of one token:
//   Bias         what is done to the weight bytes beforehand
//   Offset       isum's start, which undoes it, from -128 times the sum of the block's codes
//   kW, kX       registers that hold four columns of weights of some outputs, and of a token
//   kTileTokens  most tokens of a register tile
//   kFusedTokens most tokens that take weights straight from memory
//   Split        signed bytes, or biased ones, into kW registers
//   kPrepares    whether Spread is costly enough to be done ahead for a tile, by Prepare
//   Spread       the four codes of a token into kX registers
//   Dot          adds the products of each lane
//   kRun         rows after which Fold adds what Dot gathered, from Begin on, to isum
HWY_INLINE VI FourCodes(const int8_t* codes) {
  int32_t four;
  std::memcpy(&four, codes, sizeof(four));
  return hn::Set(DI(), four);
}

#if HWY_ARCH_X86
// VNNI: unsigned weights times signed codes. The instruction is written out because this Highway has
// no target that allows it everywhere it exists.
struct ByteOps {
  static constexpr int kW = 1, kX = 1, kRun = kRows;
  static HWY_INLINE V8 Bias(V8 bytes) { return hn::Xor(bytes, hn::Set(D8(), uint8_t{128})); }
  static HWY_INLINE VI Offset(const int32_t* offset) { return hn::Set(DI(), *offset); }
  static HWY_INLINE VI Begin(VI isum) { return isum; }
  static HWY_INLINE VI Fold(VI, VI acc) { return acc; }
  static constexpr bool kPrepares = false;
  static constexpr int kTileTokens = kVecs == 2 ? 6 : 3;
  static constexpr int kFusedTokens = kVecs == 2 ? 8 : 3;
  static HWY_INLINE void Split(VI bytes, VI* w) { w[0] = bytes; }
  static HWY_INLINE void Spread(const int8_t* codes, VI* x) { x[0] = FourCodes(codes); }
  static HWY_INLINE VI Dot(VI acc, const VI* w, const VI* x) {
#if HWY_TARGET == HWY_AVX2
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc.raw) : "x"(w[0].raw), "x"(x[0].raw));
#else
    asm("vpdpbusd %2, %1, %0" : "+v"(acc.raw) : "v"(w[0].raw), "v"(x[0].raw));
#endif
    return acc;
  }
};

// Columns 0 and 2 in one register, 1 and 3 in the other, as 16-bit halves of the lanes.
struct WordOps {
  static constexpr int kW = 2, kX = 2, kRun = kRows;
  static HWY_INLINE V8 Bias(V8 bytes) { return bytes; }
  static HWY_INLINE VI Offset(const int32_t*) { return hn::Zero(DI()); }
  static HWY_INLINE VI Begin(VI isum) { return isum; }
  static HWY_INLINE VI Fold(VI, VI acc) { return acc; }
  static constexpr bool kPrepares = true;
  static constexpr int kTileTokens = kVecs == 2 ? 6 : 3;
  static constexpr int kFusedTokens = kVecs == 2 ? 8 : 3;
  using D16 = hn::Repartition<int16_t, DF>;
  static HWY_INLINE void Split(VI bytes, VI* w) {
    const auto halves = hn::BitCast(D16(), bytes);
    w[0] = hn::BitCast(DI(), hn::ShiftRight<8>(hn::ShiftLeft<8>(halves)));
    w[1] = hn::BitCast(DI(), hn::ShiftRight<8>(halves));
  }
  static HWY_INLINE void Spread(const int8_t* codes, VI* x) { Split(FourCodes(codes), x); }
  // What Spread would put into each lane, for a block: [kX][kRows], `stride` apart.
  static HWY_INLINE void Prepare(const int8_t* codes, int32_t* x, int64_t stride) {
    const hn::CappedTag<int32_t, kRows> d;
    const hn::Repartition<int16_t, decltype(d)> d16;
    for (int64_t r = 0; r < kRows; r += static_cast<int64_t>(hn::MaxLanes(d))) {
      const auto four = hn::LoadU(d16, reinterpret_cast<const int16_t*>(codes + 4 * r));
      const auto even = hn::ShiftRight<8>(hn::ShiftLeft<8>(four));
      hn::StoreU(hn::BitCast(d, even), d, x + r);
      hn::StoreU(hn::BitCast(d, hn::ShiftRight<8>(four)), d, x + stride + r);
    }
  }
  static HWY_INLINE VI Dot(VI acc, const VI* w, const VI* x) {
    VI none = hn::Zero(DI());
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      acc = hn::ReorderWidenMulAccumulate(DI(), hn::BitCast(D16(), w[i]), hn::BitCast(D16(), x[i]),
                                          acc, none);
    }
    // Keeps the compiler from gathering all products of a block before it adds any.
    asm("" : "+v"(acc.raw));
    return acc;
  }
};
// For weights within [-12, 12], as MXFP4's are: with a bias of 12 they are unsigned, and four rows of their
// products, two columns to a 16-bit half, reach at most 4 * 2 * 24 * 127.
struct SmallOps {
  static constexpr int kW = 1, kX = 1, kRun = 4;
  static constexpr bool kPrepares = false;
  static constexpr int kTileTokens = kVecs == 2 ? 6 : 3;
  static constexpr int kFusedTokens = kVecs == 2 ? 8 : 3;
  using D16 = hn::Repartition<int16_t, DF>;
  static HWY_INLINE V8 Bias(V8 bytes) { return hn::Add(bytes, hn::Set(D8(), uint8_t{12})); }
  static HWY_INLINE VI Offset(const int32_t* offset) { return hn::Set(DI(), *offset / 32 * 3); }
  static HWY_INLINE VI Begin(VI) { return hn::Zero(DI()); }
  static HWY_INLINE VI Fold(VI isum, VI acc) {
    VI none = hn::Zero(DI());
    return hn::ReorderWidenMulAccumulate(DI(), hn::BitCast(D16(), acc), hn::Set(D16(), int16_t{1}),
                                         isum, none);
  }
  static HWY_INLINE void Split(VI bytes, VI* w) { w[0] = bytes; }
  static HWY_INLINE void Spread(const int8_t* codes, VI* x) { x[0] = FourCodes(codes); }
  static HWY_INLINE VI Dot(VI acc, const VI* w, const VI* x) {
#if HWY_TARGET == HWY_AVX2
    const VI pairs{_mm256_maddubs_epi16(w[0].raw, x[0].raw)};
#else
    const VI pairs{_mm512_maddubs_epi16(w[0].raw, x[0].raw)};
#endif
    acc = hn::BitCast(DI(), hn::Add(hn::BitCast(D16(), acc), hn::BitCast(D16(), pairs)));
    // Keeps the compiler from gathering all products before it adds any.
    asm("" : "+v"(acc.raw));
    return acc;
  }
};
#else
struct LaneOps {
  static constexpr int kW = 1, kX = 4, kRun = kRows;
  static HWY_INLINE V8 Bias(V8 bytes) { return bytes; }
  static HWY_INLINE VI Offset(const int32_t*) { return hn::Zero(DI()); }
  static HWY_INLINE VI Begin(VI isum) { return isum; }
  static HWY_INLINE VI Fold(VI, VI acc) { return acc; }
  static constexpr bool kPrepares = false;
  static constexpr int kTileTokens = 2;
  static constexpr int kFusedTokens = 2;
  static HWY_INLINE void Split(VI bytes, VI* w) { w[0] = bytes; }
  static HWY_INLINE void Spread(const int8_t* codes, VI* x) {
    for (int i = 0; i < 4; ++i) x[i] = hn::Set(DI(), int32_t{codes[i]});
  }
  static HWY_INLINE VI Dot(VI acc, const VI* w, const VI* x) {
    const VI w0 = hn::ShiftRight<24>(hn::ShiftLeft<24>(w[0]));
    const VI w1 = hn::ShiftRight<24>(hn::ShiftLeft<16>(w[0]));
    const VI w2 = hn::ShiftRight<24>(hn::ShiftLeft<8>(w[0]));
    const VI w3 = hn::ShiftRight<24>(w[0]);
    acc = hn::Add(acc, hn::Add(hn::Mul(w0, x[0]), hn::Mul(w1, x[1])));
    return hn::Add(acc, hn::Add(hn::Mul(w2, x[2]), hn::Mul(w3, x[3])));
  }
};
#endif

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard

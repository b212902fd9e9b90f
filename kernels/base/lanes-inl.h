// The 16 virtual lanes of kernels/base/types.h on registers of any width, and partial vectors.
// Included once per Highway target.
#if defined(DELTAMESH_KERNELS_BASE_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTAMESH_KERNELS_BASE_LANES_INL_H_
#undef DELTAMESH_KERNELS_BASE_LANES_INL_H_
#else
#define DELTAMESH_KERNELS_BASE_LANES_INL_H_
#endif

#include <cstring>

#include "hwy/highway.h"
#include "kernels/base/types.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, kLanes>;
using VF = hn::Vec<DF>;
inline constexpr int64_t kN = hn::MaxLanes(DF());  // floats of a register
inline constexpr int kLaneVectors = static_cast<int>(kLanes / kN);

// The first `count` floats at p, zeros after; never reads beyond them. 0 <= count <= kN.
HWY_INLINE VF LoadPart(const float* p, int64_t count) {
  const DF d;
  HWY_ALIGN float buffer[kN] = {};
  std::memcpy(buffer, p, static_cast<size_t>(count) * sizeof(float));
  return hn::Load(d, buffer);
}

// Writes the first `count` lanes and nothing else.
HWY_INLINE void StorePart(VF v, float* p, int64_t count) {
  const DF d;
  HWY_ALIGN float buffer[kN];
  hn::Store(v, d, buffer);
  std::memcpy(p, buffer, static_cast<size_t>(count) * sizeof(float));
}

// The same for any count up to kN, fast when it is kN.
HWY_INLINE VF LoadUpTo(const float* p, int64_t count) {
  return count == kN ? hn::LoadU(DF(), p) : LoadPart(p, count);
}
HWY_INLINE void StoreUpTo(VF v, float* p, int64_t count) {
  if (count == kN) {
    hn::StoreU(v, DF(), p);
  } else {
    StorePart(v, p, count);
  }
}

// Calls body(i, count) for consecutive stretches of [begin, end), count = kN but for the last.
template <class Body>
HWY_INLINE void ForVectors(int64_t begin, int64_t end, const Body& body) {
  int64_t i = begin;
  for (; i + kN <= end; i += kN) body(i, kN);
  if (i < end) body(i, end - i);
}

// 16 running sums, +0 at first. (The constructor is written out because an implicit one would be compiled
// without this target's instructions.)
struct Lanes {
  VF v[kLaneVectors];

  HWY_INLINE Lanes() {
    for (int j = 0; j < kLaneVectors; ++j) v[j] = hn::Zero(DF());
  }
  // lane l takes a[l] * b[l].
  HWY_INLINE void MulAdd(const float* a, const float* b) {
    const DF d;
    for (int j = 0; j < kLaneVectors; ++j) {
      v[j] = hn::MulAdd(hn::LoadU(d, a + j * kN), hn::LoadU(d, b + j * kN), v[j]);
    }
  }
  // The same for the first `count` lanes; the others keep their bits.
  HWY_INLINE void MulAddPart(const float* a, const float* b, int64_t count) {
    const DF d;
    for (int j = 0; j < kLaneVectors; ++j) {
      const int64_t left = HWY_MIN(HWY_MAX(count - j * kN, int64_t{0}), kN);
      const VF sum = hn::MulAdd(LoadPart(a + j * kN, left), LoadPart(b + j * kN, left), v[j]);
      v[j] = hn::IfThenElse(hn::FirstN(d, static_cast<size_t>(left)), sum, v[j]);
    }
  }
  // Lane l takes v[l].
  HWY_INLINE void Add(const VF (&x)[kLaneVectors]) {
    for (int j = 0; j < kLaneVectors; ++j) v[j] = hn::Add(v[j], x[j]);
  }
};

// Takes a[i] * b[i] into lane i mod 16, i < count.
HWY_INLINE void LaneDot(const float* a, const float* b, int64_t count, Lanes& lanes) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) lanes.MulAdd(a + i, b + i);
  if (i < count) lanes.MulAddPart(a + i, b + i, count - i);
}

// Halves added to halves down to 4 lanes: 0..3 of the result hold the first two levels of
// ReduceLanes.
using D4 = hn::CappedTag<float, 4>;
using V4 = hn::Vec<D4>;
HWY_INLINE V4 FoldTo4(const Lanes& lanes) {
#if HWY_TARGET == HWY_AVX3
  const hn::Half<DF> d8;
  const auto h8 = hn::Add(hn::LowerHalf(d8, lanes.v[0]), hn::UpperHalf(d8, lanes.v[0]));
  return hn::Add(hn::LowerHalf(D4(), h8), hn::UpperHalf(D4(), h8));
#elif HWY_TARGET == HWY_AVX2
  const auto h8 = hn::Add(lanes.v[0], lanes.v[1]);
  return hn::Add(hn::LowerHalf(D4(), h8), hn::UpperHalf(D4(), h8));
#else
  return hn::Add(hn::Add(lanes.v[0], lanes.v[2]), hn::Add(lanes.v[1], lanes.v[3]));
#endif
}

HWY_INLINE float Reduce(const Lanes& lanes) {
  V4 v = FoldTo4(lanes);
  v = hn::Add(v, hn::Shuffle1032(v));
  v = hn::Add(v, hn::Shuffle2301(v));
  return hn::GetLane(v);
}

// Four reductions at once: lane i of the result is Reduce(lanes[i]).
HWY_INLINE V4 Reduce4(const Lanes& a, const Lanes& b, const Lanes& c, const Lanes& e) {
  const D4 d;
  const V4 a4 = FoldTo4(a), b4 = FoldTo4(b), c4 = FoldTo4(c), e4 = FoldTo4(e);
  const V4 ab = hn::Add(hn::ConcatLowerLower(d, b4, a4), hn::ConcatUpperUpper(d, b4, a4));
  const V4 ce = hn::Add(hn::ConcatLowerLower(d, e4, c4), hn::ConcatUpperUpper(d, e4, c4));
  return hn::Add(hn::ConcatEven(d, ce, ab), hn::ConcatOdd(d, ce, ab));
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard

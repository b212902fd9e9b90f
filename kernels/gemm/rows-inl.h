// Row sources: the packed formats as rows of floats, one row of 32 outputs per column. Included once
// per Highway target.
#if defined(DELTAMESH_KERNELS_GEMM_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTAMESH_KERNELS_GEMM_ROWS_INL_H_
#undef DELTAMESH_KERNELS_GEMM_ROWS_INL_H_
#else
#define DELTAMESH_KERNELS_GEMM_ROWS_INL_H_
#endif

#include <type_traits>

#include "hwy/highway.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/mxfp4-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, 16>;
using V = hn::Vec<D>;
constexpr int kWidth = static_cast<int>(hn::MaxLanes(D()));
constexpr int kVecs = static_cast<int>(kPanel) / kWidth;  // registers of a panel

// Of every source: Start(k) before each multiple of 32, then Row<j>(i, w) for the weights of column
// k + i + j, with i a multiple of 4 below 32 and j below 4.
struct F32Rows {
  explicit F32Rows(const PackedMatrix& m, int64_t panel)
      : base(reinterpret_cast<const float*>(m.data) + panel * m.cols * kPanel) {}
  HWY_INLINE void Start(int64_t k) { block = base + k * kPanel; }
  template <int j>
  HWY_INLINE void Row(int64_t i, V (&w)[kVecs]) const {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) w[v] = hn::LoadU(D(), block + (i + j) * kPanel + v * kWidth);
  }
  const float* base;
  const float* block = nullptr;
};

struct Bf16Rows {
  explicit Bf16Rows(const PackedMatrix& m, int64_t panel)
      : base(reinterpret_cast<const uint16_t*>(m.data) + panel * m.cols * kPanel) {}
  HWY_INLINE void Start(int64_t k) { block = base + k * kPanel; }
  template <int j>
  HWY_INLINE void Row(int64_t i, V (&w)[kVecs]) const {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> d16;
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      const auto bits = hn::PromoteTo(du, hn::LoadU(d16, block + (i + j) * kPanel + v * kWidth));
      w[v] = hn::BitCast(D(), hn::ShiftLeft<16>(bits));
    }
  }
  const uint16_t* base;
  const uint16_t* block = nullptr;
};

struct MxRows {
  static constexpr int64_t kHalf = kPanel / 2;  // outputs in low nibbles
  static constexpr int64_t kGroupBytes = kPanel + kMxBlock * kHalf;
  explicit MxRows(const PackedMatrix& m, int64_t panel)
      : base(reinterpret_cast<const uint8_t*>(m.data) + panel * (m.cols / kMxBlock) * kGroupBytes) {
  }
  HWY_INLINE void Start(int64_t k) {
    group = base + k / kMxBlock * kGroupBytes;
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) scale[v] = MxScales(D(), group + v * kWidth);
  }
  template <int j>
  HWY_INLINE void Row(int64_t i, V (&w)[kVecs]) const {
    const hn::RebindToUnsigned<D> du;
    const hn::Repartition<uint8_t, D> d8;
    const uint8_t* row = group + kPanel + i * kHalf;
#pragma GCC unroll 8
    for (int v = 0; v < kVecs / 2; ++v) {
      const auto lanes = hn::BitCast(du, hn::LoadU(d8, row + v * 4 * kWidth));
      w[v] = hn::Mul(MxDecode<j, 0>(D(), lanes), scale[v]);
      w[v + kVecs / 2] = hn::Mul(MxDecode<j, 1>(D(), lanes), scale[v + kVecs / 2]);
    }
  }
  const uint8_t* base;
  const uint8_t* group = nullptr;
  V scale[kVecs];
};

struct Int8Rows {
  static constexpr int64_t kScaleBytes = 2 * kPanel;
  static constexpr int64_t kGroupBytes = kScaleBytes + kMxBlock * kPanel;
  explicit Int8Rows(const PackedMatrix& m, int64_t panel)
      : base(reinterpret_cast<const uint8_t*>(m.data) + panel * (m.cols / kMxBlock) * kGroupBytes) {
  }
  // A code is moved to the top byte of its lane, so its float is 2^24 times as large and the scale
  // as much smaller: both exact, as no scale is below 2^-97.
  HWY_INLINE void Start(int64_t k) {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> d16;
    group = base + k / kMxBlock * kGroupBytes;
    const auto* scales = reinterpret_cast<const uint16_t*>(group);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      const auto bits = hn::PromoteTo(du, hn::LoadU(d16, scales + v * kWidth));
      scale[v] = hn::Mul(hn::BitCast(D(), hn::ShiftLeft<16>(bits)), hn::Set(D(), 0x1p-24f));
    }
  }
  template <int j>
  HWY_INLINE void Row(int64_t i, V (&w)[kVecs]) const {
    const hn::Repartition<uint8_t, D> d8;
    const uint8_t* row = group + kScaleBytes + i * kPanel;
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      w[v] = hn::Mul(TopByteFloat<j>(D(), hn::LoadU(d8, row + v * 4 * kWidth)), scale[v]);
    }
  }
  const uint8_t* base;
  const uint8_t* group = nullptr;
  V scale[kVecs];
};

template <int j>
using Column = std::integral_constant<int, j>;

// Calls f(i, Column<j>()) for i + j = 0 .. count - 1 in turn, where count <= 32 and i is a multiple
// of 4.
template <class F>
HWY_INLINE void ForColumns(int64_t count, F f) {
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    f(i, Column<0>());
    f(i, Column<1>());
    f(i, Column<2>());
    f(i, Column<3>());
  }
  if (i < count) f(i, Column<0>());
  if (i + 1 < count) f(i, Column<1>());
  if (i + 2 < count) f(i, Column<2>());
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard

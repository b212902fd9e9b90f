// Row sources: the packed formats as rows of floats, 32 outputs per column; in formats with scales
// the floats are codes. Included once per Highway target.
#if defined(DELTAMESH_KERNELS_GEMM_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTAMESH_KERNELS_GEMM_ROWS_INL_H_
#undef DELTAMESH_KERNELS_GEMM_ROWS_INL_H_
#else
#define DELTAMESH_KERNELS_GEMM_ROWS_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/gemm/fetch.h"
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

// A column among four; kLast if no others of its block follow them.
template <int j, bool kLast>
struct Column {
  static constexpr int value = j;
};

// Calls f(i, Column<j>()) for i + j = 0 .. count - 1 in turn, where count <= 32 and i is a multiple
// of 4.
template <class F>
HWY_INLINE void ForColumns(int64_t count, F f) {
  int64_t i = 0;
  for (; i + 4 < HWY_MIN(count + 1, kMxBlock); i += 4) {
    f(i, Column<0, false>());
    f(i, Column<1, false>());
    f(i, Column<2, false>());
    f(i, Column<3, false>());
  }
  if (i < count) f(i, Column<0, true>());
  if (i + 1 < count) f(i, Column<1, true>());
  if (i + 2 < count) f(i, Column<2, true>());
  if (i + 3 < count) f(i, Column<3, true>());
}

// Of every source: At(k) is where the packed bytes from column k on lie, k a multiple of 32. After
// Start(k), Row(i, Column<j>(), w) gives column k + i + j, with i a multiple of 4 below 32 and j
// below 4, and Scales(s) the block's scales if kScaled. Fetch, with Row's i and j, and
// FetchScales if kScaled ask for the same further on: a line that none asks for costs as much as many.
struct F32Rows {
  static constexpr bool kScaled = false;
  explicit F32Rows(const PackedMatrix& m, int64_t panel)
      : base(reinterpret_cast<const float*>(m.data) + panel * m.cols * kPanel) {}
  HWY_INLINE const float* At(int64_t k) const { return base + k * kPanel; }
  HWY_INLINE void Start(int64_t k) { block = At(k); }
  template <int j, bool kLast>
  HWY_INLINE void Fetch(int64_t i, Column<j, kLast>) const {
    FetchAhead(block + (i + j) * kPanel);
    FetchAhead(block + (i + j) * kPanel + kPanel / 2);
  }
  template <int j, bool kLast>
  HWY_INLINE void Row(int64_t i, Column<j, kLast>, V (&w)[kVecs]) const {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) w[v] = hn::LoadU(D(), block + (i + j) * kPanel + v * kWidth);
  }
  const float* base;
  const float* block = nullptr;
};

struct Bf16Rows {
  static constexpr bool kScaled = false;
  explicit Bf16Rows(const PackedMatrix& m, int64_t panel)
      : base(reinterpret_cast<const uint16_t*>(m.data) + panel * m.cols * kPanel) {}
  HWY_INLINE const uint16_t* At(int64_t k) const { return base + k * kPanel; }
  HWY_INLINE void Start(int64_t k) { block = At(k); }
  template <int j, bool kLast>
  HWY_INLINE void Fetch(int64_t i, Column<j, kLast>) const {
    FetchAhead(block + (i + j) * kPanel);
  }
  template <int j, bool kLast>
  HWY_INLINE void Row(int64_t i, Column<j, kLast>, V (&w)[kVecs]) const {
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
  static constexpr bool kScaled = true;
  static constexpr int64_t kHalf = kPanel / 2;  // outputs in low nibbles
  static constexpr int64_t kGroupBytes = kPanel + kMxBlock * kHalf;
  explicit MxRows(const PackedMatrix& m, int64_t panel)
      : base(reinterpret_cast<const uint8_t*>(m.data) + panel * (m.cols / kMxBlock) * kGroupBytes) {
  }
  HWY_INLINE const uint8_t* At(int64_t k) const { return base + k / kMxBlock * kGroupBytes; }
  HWY_INLINE void Start(int64_t k) { group = At(k); }
  HWY_INLINE void FetchScales() const { FetchAhead(group); }
  template <int j, bool kLast>
  HWY_INLINE void Fetch(int64_t i, Column<j, kLast>) const {
    if constexpr (j == 0) FetchAhead(group + kPanel + i * kHalf);  // 64 bytes hold four columns
  }
  HWY_INLINE void Scales(V (&s)[kVecs]) const {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) s[v] = MxDecodeScales(D(), group + v * kWidth);
  }
  template <int j, bool kLast>
  HWY_INLINE void Row(int64_t i, Column<j, kLast>, V (&w)[kVecs]) const {
    const hn::RebindToUnsigned<D> du;
    const hn::Repartition<uint8_t, D> d8;
    const uint8_t* row = group + kPanel + i * kHalf;
#pragma GCC unroll 8
    for (int v = 0; v < kVecs / 2; ++v) {
      // Sixteen lanes ignore what lies above a code, so that reading j bytes further on saves a shift;
      // after the last row there may be nothing to read.
      constexpr int kSkip = kWidth == 16 && !kLast ? j : 0;
      const auto lanes = hn::BitCast(du, hn::LoadU(d8, row + v * 4 * kWidth + kSkip));
      w[v] = MxDecode<j - kSkip, 0>(D(), lanes);
      w[v + kVecs / 2] = MxDecode<j - kSkip, 1>(D(), lanes);
    }
  }
  const uint8_t* base;
  const uint8_t* group = nullptr;
};

struct Int8Rows {
  static constexpr bool kScaled = true;
  static constexpr int64_t kScaleBytes = 2 * kPanel;
  static constexpr int64_t kGroupBytes = kScaleBytes + kMxBlock * kPanel;
  explicit Int8Rows(const PackedMatrix& m, int64_t panel)
      : base(reinterpret_cast<const uint8_t*>(m.data) + panel * (m.cols / kMxBlock) * kGroupBytes) {
  }
  HWY_INLINE const uint8_t* At(int64_t k) const { return base + k / kMxBlock * kGroupBytes; }
  HWY_INLINE void Start(int64_t k) { group = At(k); }
  HWY_INLINE void FetchScales() const { FetchAhead(group); }
  template <int j, bool kLast>
  HWY_INLINE void Fetch(int64_t i, Column<j, kLast>) const {
    if constexpr (j % 2 == 0) FetchAhead(group + kScaleBytes + (i + j) * kPanel);  // 64 hold two
  }
  HWY_INLINE void Scales(V (&s)[kVecs]) const {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> d16;
    const auto* scales = reinterpret_cast<const uint16_t*>(group);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      const auto bits = hn::PromoteTo(du, hn::LoadU(d16, scales + v * kWidth));
      s[v] = hn::Mul(hn::BitCast(D(), hn::ShiftLeft<16>(bits)), hn::Set(D(), 0x1p-24f));
    }
  }
  template <int j, bool kLast>
  HWY_INLINE void Row(int64_t i, Column<j, kLast>, V (&w)[kVecs]) const {
    const hn::Repartition<uint8_t, D> d8;
    const uint8_t* row = group + kScaleBytes + i * kPanel;
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      w[v] = TopByteFloat<j>(D(), hn::LoadU(d8, row + v * 4 * kWidth));
    }
  }
  const uint8_t* base;
  const uint8_t* group = nullptr;
};

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard

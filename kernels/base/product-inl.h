// The small matrix product inside several kernels: y[r][c] continues the chain fma(x[r][k],
// w[k][c], .) over ascending k. Elements are independent chains, so no tiling shows in the bits.
// Included once per Highway target.
#if defined(DELTAMESH_KERNELS_BASE_PRODUCT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTAMESH_KERNELS_BASE_PRODUCT_INL_H_
#undef DELTAMESH_KERNELS_BASE_PRODUCT_INL_H_
#else
#define DELTAMESH_KERNELS_BASE_PRODUCT_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/base/types.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Where a chain starts: at +0, at y, or at y * scale[r].
enum class ChainStart { kZero, kKeep, kScale };

struct ProductParams {
  const float* const* x;  // [rows] -> [k]
  const float* w;         // [k][cols], w_stride
  int64_t w_stride;
  const float* scale;  // [rows], for ChainStart::kScale
  float* const* y;     // [rows] -> [cols]; not overlapping x or w
  int64_t rows, k, cols;
};

template <ChainStart kStart, int kRows, int kVecs, class D>
HWY_INLINE void ProductTile(D d, const ProductParams& p, int64_t row, int64_t col, int64_t k_begin,
                            int64_t k_end) {
  constexpr int64_t kWidth = static_cast<int64_t>(hn::MaxLanes(D()));
  using V = hn::Vec<D>;
  V acc[kRows][kVecs];
  const float* x[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    x[r] = p.x[row + r];
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      const float* y = p.y[row + r] + col + v * kWidth;
      if (kStart == ChainStart::kZero) acc[r][v] = hn::Zero(d);
      if (kStart == ChainStart::kKeep) acc[r][v] = hn::LoadU(d, y);
      if (kStart == ChainStart::kScale) {
        acc[r][v] = hn::Mul(hn::LoadU(d, y), hn::Set(d, p.scale[row + r]));
      }
    }
  }
  const float* w = p.w + k_begin * p.w_stride + col;
  for (int64_t k = k_begin; k < k_end; ++k, w += p.w_stride) {
    V wv[kVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) wv[v] = hn::LoadU(d, w + v * kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const V xk = hn::Set(d, x[r][k]);
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; ++v) acc[r][v] = hn::MulAdd(xk, wv[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; ++v) {
      hn::StoreU(acc[r][v], d, p.y[row + r] + col + v * kWidth);
    }
  }
}

template <ChainStart kStart, int kVecs, class D>
HWY_NOINLINE void ProductRows(D d, const ProductParams& p, int64_t col, int64_t k0, int64_t k1) {
  // Accumulators and weights of a tile have to fit the 16 or 32 registers.
  constexpr int kRows = HWY_TARGET == HWY_AVX2 ? 2 : 4;
  int64_t r = 0;
  for (; r + kRows <= p.rows; r += kRows) ProductTile<kStart, kRows, kVecs>(d, p, r, col, k0, k1);
  if (kRows > 2 && r + 2 <= p.rows) {
    ProductTile<kStart, 2, kVecs>(d, p, r, col, k0, k1);
    r += 2;
  }
  if (r < p.rows) ProductTile<kStart, 1, kVecs>(d, p, r, col, k0, k1);
}

// One strip of columns. With many rows it is cut in depth, so that it stays in the first-level cache
// although a power-of-two stride uses only some of its sets; the chains go on through y.
template <ChainStart kStart, int kVecs, class D>
HWY_INLINE void ProductStrip(D d, const ProductParams& p, int64_t col) {
  constexpr int64_t kDepth = 64, kFewRows = 4;
  const int64_t depth = p.rows <= kFewRows ? p.k : HWY_MIN(p.k, kDepth);
  ProductRows<kStart, kVecs>(d, p, col, 0, depth);
  for (int64_t k = depth; k < p.k; k += kDepth) {
    ProductRows<ChainStart::kKeep, kVecs>(d, p, col, k, HWY_MIN(k + kDepth, p.k));
  }
}

// Columns outside, rows inside: a strip of w stays in the first-level cache while every row passes.
template <ChainStart kStart>
HWY_INLINE void Product(const ProductParams& p) {
  const hn::CappedTag<float, kLanes> d;
  const hn::CappedTag<float, 1> d1;
  constexpr int64_t kWidth = static_cast<int64_t>(hn::MaxLanes(hn::CappedTag<float, kLanes>()));
  int64_t c = 0;
  for (; c + 4 * kWidth <= p.cols; c += 4 * kWidth) ProductStrip<kStart, 4>(d, p, c);
  for (; c + kWidth <= p.cols; c += kWidth) ProductStrip<kStart, 1>(d, p, c);
  for (; c < p.cols; ++c) ProductStrip<kStart, 1>(d1, p, c);
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard

// The two products of attention over one block, as register tiles. Scores keep pairs in the lanes (queries
// packed once, latents broadcast), weighted sums keep latent elements there: neither needs the block
// transposed. Every output is its own chain, so tiling never shows in the bits.
// Included once per Highway target.
#if defined(DELTAMESH_KERNELS_MLA_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTAMESH_KERNELS_MLA_TILES_INL_H_
#undef DELTAMESH_KERNELS_MLA_TILES_INL_H_
#else
#define DELTAMESH_KERNELS_MLA_TILES_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/base/lanes-inl.h"
#include "kernels/base/types.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

inline constexpr bool kWide = kLaneVectors == 1;  // 32 registers

// Columns of a row taken at a time: that stretch of a block and of the queries stays in the first-level
// cache while all tiles pass; chains go on through e.
inline constexpr int64_t kScoreDepth = 128;

struct ScoreParams {
  const float* q;     // [panels][width][kN]: panels of kN pairs
  const float* rows;  // [64][width]
  const float* next;  // the block after this one, fetched ahead; null: none
  int64_t width;
  float* e;  // [64][e_stride]
  int64_t e_stride;
};

// e[s .. s + kRows)[panel .. panel + kVecs) over columns [k0, k1).
template <int kVecs, int kRows, bool kAhead>
HWY_INLINE void ScoreTile(const ScoreParams& p, int64_t panel, int64_t s, int64_t k0, int64_t k1) {
  const DF d;
  VF acc[kRows][kVecs];
  float* e = p.e + s * p.e_stride + panel * kN;
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      acc[i][v] = k0 == 0 ? hn::Zero(d) : hn::LoadU(d, e + i * p.e_stride + v * kN);
    }
  }
  const int64_t w = p.width, w2 = 2 * w, w3 = 3 * w, panel_floats = w * kN;
  const float* q = p.q + panel * panel_floats + k0 * kN;
  // Pointers to every fourth row move along; the three rows between are at offsets that registers hold.
  const float* row[kRows / 4];
#pragma GCC unroll 4
  for (int i = 0; i < kRows / 4; ++i) row[i] = p.rows + (s + 4 * i) * w + k0;
  const auto column = [&]() HWY_ATTR {
    VF qk[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) qk[v] = hn::LoadU(d, q + v * panel_floats);
    q += kN;
#pragma GCC unroll 4
    for (int i = 0; i < kRows / 4; ++i) {
      const int64_t offset[4] = {0, w, w2, w3};
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const VF x = hn::Set(d, row[i][offset[j]]);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) acc[4 * i + j][v] = hn::MulAdd(x, qk[v], acc[4 * i + j][v]);
      }
      ++row[i];
    }
  };
  int64_t k = k0;
  if (kAhead) {
    // Sixteen columns of a row are a line.
    const float* ahead = p.next + s * w + k0;
    for (; k + kLanes <= k1; k += kLanes, ahead += kLanes - kRows * w) {
      for (int i = 0; i < kRows; ++i, ahead += w) {
        __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 4
        for (int j = 0; j < kLanes / kRows; ++j) column();
      }
    }
  }
  for (; k < k1; ++k) column();
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) hn::StoreU(acc[i][v], d, e + i * p.e_stride + v * kN);
  }
}

template <int kVecs, int kRows, bool kAhead>
HWY_NOINLINE void ScorePanels(const ScoreParams& p, int64_t panel, int64_t count, int64_t k0,
                              int64_t k1) {
  for (int64_t s = 0; s < count; s += kRows) ScoreTile<kVecs, kRows, kAhead>(p, panel, s, k0, k1);
}

template <bool kAhead>
HWY_INLINE void ScorePanelsOf(int64_t panels, const ScoreParams& p, int64_t panel, int64_t count,
                              int64_t k0, int64_t k1) {
  switch (panels) {
    case 1:
      return ScorePanels < 1, kWide ? 16 : 8, kAhead > (p, panel, count, k0, k1);
    case 2:
      return ScorePanels < 2, kWide ? 8 : 4, kAhead > (p, panel, count, k0, k1);
    default:
      return ScorePanels < 3, kWide ? 8 : 4, kAhead > (p, panel, count, k0, k1);
  }
}

// Scores of panels [begin, end) against the first `count` rows; up to 15 more rows of e are overwritten.
HWY_INLINE void ScoreBlock(const ScoreParams& p, int64_t begin, int64_t end, int64_t count) {
  for (int64_t k0 = 0; k0 < p.width; k0 += kScoreDepth) {
    const int64_t k1 = HWY_MIN(k0 + kScoreDepth, p.width);
    for (int64_t panel = begin; panel < end;) {
      const int64_t panels = HWY_MIN(end - panel, 3);
      if (panel == begin && p.next != nullptr) {
        ScorePanelsOf<true>(panels, p, panel, count, k0, k1);
      } else {
        ScorePanelsOf<false>(panels, p, panel, count, k0, k1);
      }
      panel += panels;
    }
  }
}

enum class SumStart { kZero, kKeep, kScale };

struct SumParams {
  const float* e;  // [64][e_stride], at the first pair
  int64_t e_stride;
  const float* rows;  // [64][width]
  int64_t width, rank;
  SumStart start;
  const float* f;  // [pairs], for kScale
  float* acc;      // [pairs][acc_stride]
  int64_t acc_stride;
  int64_t pairs, s_begin, s_end;
};

template <int kPairs, int kVecs, class D>
HWY_NOINLINE void SumTile(D d, const SumParams& p, int64_t pair, int64_t col) {
  constexpr int64_t kWidth = static_cast<int64_t>(hn::MaxLanes(D()));
  hn::Vec<D> acc[kPairs][kVecs];
  float* y = p.acc + pair * p.acc_stride + col;
#pragma GCC unroll 8
  for (int i = 0; i < kPairs; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      acc[i][v] = p.start == SumStart::kZero ? hn::Zero(d)
                                             : hn::LoadU(d, y + i * p.acc_stride + v * kWidth);
    }
  }
  if (p.start == SumStart::kScale) {
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; ++i) {
      const auto f = hn::Set(d, p.f[pair + i]);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) acc[i][v] = hn::Mul(acc[i][v], f);
    }
  }
  const float* row = p.rows + p.s_begin * p.width + col;
  const float* e = p.e + p.s_begin * p.e_stride + pair;
  for (int64_t s = p.s_begin; s < p.s_end; ++s, row += p.width, e += p.e_stride) {
    hn::Vec<D> c[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) c[v] = hn::LoadU(d, row + v * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; ++i) {
      const auto x = hn::Set(d, e[i]);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) acc[i][v] = hn::MulAdd(x, c[v], acc[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kPairs; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      hn::StoreU(acc[i][v], d, y + i * p.acc_stride + v * kWidth);
    }
  }
}

template <int kVecs, class D>
HWY_INLINE void SumStrip(D d, const SumParams& p, int64_t col) {
  int64_t i = 0;
  for (; i + 6 <= p.pairs; i += 6) SumTile<6, kVecs>(d, p, i, col);
  if (i + 4 <= p.pairs) {
    SumTile<4, kVecs>(d, p, i, col);
    i += 4;
  }
  if (i + 2 <= p.pairs) {
    SumTile<2, kVecs>(d, p, i, col);
    i += 2;
  }
  if (i < p.pairs) SumTile<1, kVecs>(d, p, i, col);
}

// acc of every pair takes e * row for rows [s_begin, s_end).
HWY_INLINE void SumRows(const SumParams& p) {
  constexpr int kVecs = kWide ? 4 : 2;
  int64_t c = 0;
  for (; c + kVecs * kN <= p.rank; c += kVecs * kN) SumStrip<kVecs>(DF(), p, c);
  for (; c + kN <= p.rank; c += kN) SumStrip<1>(DF(), p, c);
  for (; c < p.rank; ++c) SumStrip<1>(hn::CappedTag<float, 1>(), p, c);
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard

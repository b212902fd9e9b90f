// Many tokens: a stretch of k is decoded once into the first-level cache and used by all tokens of a
// block. Included once per Highway target.
#if defined(DELTAMESH_KERNELS_GEMM_BLOCK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTAMESH_KERNELS_GEMM_BLOCK_INL_H_
#undef DELTAMESH_KERNELS_GEMM_BLOCK_INL_H_
#else
#define DELTAMESH_KERNELS_GEMM_BLOCK_INL_H_
#endif

#include <cstring>
#include <type_traits>
#include <utility>

#include "hwy/highway.h"
#include "kernels/gemm/fused-inl.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Panels side by side, as many as registers hold: each input that is loaded then meets more weights.
constexpr int kWide = kVecs == 2 ? 2 : 1;
// Tokens of a register tile: kPanels * kVecs accumulators each, as many weights, and one input.
template <int kPanels>
inline constexpr int kTileTokens = kVecs == 2 ? 12 / kPanels : 3;
constexpr int64_t kStretch = 128 / kWide;  // columns decoded at a time
constexpr int64_t kBlockTokens = 126;      // most tokens that share a decoded stretch

// A decoded stretch of some panels: of each [count][32] weights, and per 32 of them [32] scales if the
// format has them.
template <int kPanels>
struct Stretch {
  const float* w[kPanels];
  const float* scales[kPanels];
  int64_t count;
  // Packed bytes to ask for meanwhile: from `next` on, `step` for each column that a tile passes.
  const char* next[kPanels];
  int64_t step;
};

// One row of accumulators: [panel][32].
template <int kPanels>
using Sums = V[kPanels][kVecs];

// sum += x * w over the columns [k0, k1) of a stretch.
template <int kPanels, int kTokens>
HWY_INLINE void AddColumns(const float* x, int64_t x_stride, const Stretch<kPanels>& s, int64_t k0,
                           int64_t k1, Sums<kPanels> (&sum)[kTokens]) {
  for (int64_t k = k0; k < k1; ++k) {
    V wk[kPanels][kVecs];
#pragma GCC unroll 8
    for (int i = 0; i < kPanels; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        wk[i][v] = hn::LoadU(D(), s.w[i] + k * kPanel + v * kWidth);
      }
      __builtin_prefetch(s.next[i] + k * s.step, 0, 2);
    }
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
      const V xk = hn::Set(D(), x[t * x_stride + k]);
#pragma GCC unroll 8
      for (int i = 0; i < kPanels; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) sum[t][i][v] = hn::MulAdd(xk, wk[i][v], sum[t][i][v]);
      }
    }
  }
}

// Continues `kTokens` rows of acc [.][panel][32] over a stretch.
template <bool kScaled, int kPanels, int kTokens>
HWY_NOINLINE void StretchTile(const float* x, int64_t x_stride, const Stretch<kPanels>& s,
                              float* acc) {
  Sums<kPanels> sum[kTokens];
  const auto each = [&](auto f) HWY_ATTR {
#pragma GCC unroll 16
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
      for (int i = 0; i < kPanels; ++i) {
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          f(sum[t][i][v], acc + (t * kPanels + i) * kPanel + v * kWidth, i, v);
        }
      }
    }
  };
  if constexpr (!kScaled) {
    each([](V& v, float* a, int, int) HWY_ATTR { v = hn::Load(D(), a); });
    AddColumns<kPanels, kTokens>(x, x_stride, s, 0, s.count, sum);
    each([](V& v, float* a, int, int) HWY_ATTR { hn::Store(v, D(), a); });
    return;
  }
  for (int64_t k = 0; k < s.count; k += kMxBlock) {
    each([](V& v, float*, int, int) HWY_ATTR { v = hn::Zero(D()); });
    AddColumns<kPanels, kTokens>(x, x_stride, s, k, k + kMxBlock, sum);
    each([&](V& v, float* a, int i, int at) HWY_ATTR {
      const V scale = hn::Load(D(), s.scales[i] + k + at * kWidth);
      hn::Store(hn::MulAdd(v, scale, hn::Load(D(), a)), D(), a);
    });
  }
}

// Calls the tile for the number of tokens left, 1 <= count <= kTokens.
template <bool kScaled, int kPanels, int kTokens = kTileTokens<kPanels>>
HWY_INLINE void AnyStretchTile(int64_t count, const float* x, int64_t x_stride,
                               const Stretch<kPanels>& s, float* acc) {
  if (count == kTokens) return StretchTile<kScaled, kPanels, kTokens>(x, x_stride, s, acc);
  if constexpr (kTokens > 1) {
    AnyStretchTile<kScaled, kPanels, kTokens - 1>(count, x, x_stride, s, acc);
  }
}

template <class Rows>
HWY_INLINE void DecodeStretch(Rows& rows, int64_t k0, int64_t k1, float* out, float* scales) {
  for (int64_t b0 = k0; b0 < k1; b0 += kMxBlock) {
    rows.Start(b0);
    float* block = out + (b0 - k0) * kPanel;
    ForColumns(HWY_MIN(kMxBlock, k1 - b0), [&](int64_t k, auto j) HWY_ATTR {
      V w[kVecs];
      rows.Row(k, j, w);
      float* row = block + (k + j.value) * kPanel;
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) hn::Store(w[v], D(), row + v * kWidth);
    });
    if constexpr (Rows::kScaled) {
      V s[kVecs];
      rows.Scales(s);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) hn::Store(s[v], D(), scales + (b0 - k0) + v * kWidth);
    }
  }
}

// The first of the fewest parts of at most `most` that are about equal; small tiles would leave
// chains waiting.
HWY_INLINE int64_t EvenPart(int64_t count, int64_t most) {
  const int64_t parts = (count + most - 1) / most;
  return (count + parts - 1) / parts;
}

// Outputs of kPanels panels from `panel` on.
template <class Rows, int kPanels, size_t... kIndex>
HWY_NOINLINE void BlockPanels(const GemmParams& p, int64_t token, int64_t tokens, int64_t panel,
                              std::index_sequence<kIndex...>) {
  HWY_ALIGN float weights[kPanels][kStretch * kPanel];
  HWY_ALIGN float scales[kPanels][kStretch];
  HWY_ALIGN float acc[kBlockTokens * kPanels * kPanel];
  std::memset(acc, 0, static_cast<size_t>(tokens * kPanels * kPanel) * sizeof(float));
  Rows rows[kPanels] = {Rows(p.w, panel + static_cast<int64_t>(kIndex))...};
  Stretch<kPanels> s = {{weights[kIndex]...}, {scales[kIndex]...}, 0, {}, 0};
  for (int64_t k0 = 0; k0 < p.w.cols; k0 += kStretch) {
    const int64_t k1 = HWY_MIN(k0 + kStretch, p.w.cols);
    s.count = k1 - k0;
    for (int i = 0; i < kPanels; ++i) {
      if constexpr (std::is_same_v<Rows, F32Rows>) {
        s.w[i] = rows[i].base + k0 * kPanel;
      } else {
        DecodeStretch(rows[i], k0, k1, weights[i], scales[i]);
      }
      // The stretch after this one, of the next panel if this one ends.
      s.next[i] = reinterpret_cast<const char*>(rows[i].At(k1));
      s.step = (s.next[i] - reinterpret_cast<const char*>(rows[i].At(k0))) / s.count;
    }
    for (int64_t t = 0; t < tokens;) {
      const int64_t n = EvenPart(tokens - t, kTileTokens<kPanels>);
      AnyStretchTile<Rows::kScaled>(n, p.x + (token + t) * p.x_stride + k0, p.x_stride, s,
                                    acc + t * kPanels * kPanel);
      t += n;
      s.step = 0;  // the first tile asked for all of it
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    for (int i = 0; i < kPanels; ++i) {
      V row[kVecs];
      const float* from = acc + (t * kPanels + i) * kPanel;
      for (int v = 0; v < kVecs; ++v) row[v] = hn::Load(D(), from + v * kWidth);
      StorePanel(p, token + t, panel + i, row);
    }
  }
}

template <class Rows>
HWY_INLINE void Blocks(const GemmParams& p) {
  for (int64_t token = 0; token < p.tokens;) {
    const int64_t tokens = EvenPart(p.tokens - token, kBlockTokens);
    int64_t panel = p.panel_begin;
    for (; panel + kWide <= p.panel_end; panel += kWide) {
      BlockPanels<Rows, kWide>(p, token, tokens, panel, std::make_index_sequence<kWide>());
    }
    for (; panel < p.panel_end; ++panel) {
      BlockPanels<Rows, 1>(p, token, tokens, panel, std::make_index_sequence<1>());
    }
    token += tokens;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard

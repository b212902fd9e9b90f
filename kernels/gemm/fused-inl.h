// Few tokens: weights are decoded on the way into the multiply-adds and read once, some panels side
// by side so that enough chains and streams of memory are in flight. Included once per Highway target.
#if defined(DELTAMESH_KERNELS_GEMM_FUSED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTAMESH_KERNELS_GEMM_FUSED_INL_H_
#undef DELTAMESH_KERNELS_GEMM_FUSED_INL_H_
#else
#define DELTAMESH_KERNELS_GEMM_FUSED_INL_H_
#endif

#include <cstring>
#include <utility>

#include "hwy/highway.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Accumulators that the registers hold beside weights and inputs.
constexpr int kSums = kVecs == 2 ? 24 : 12;
// A panel whose outputs are too many for that is passed in two halves, the second time out of the
// second-level cache.
template <int kTokens>
inline constexpr int kHalves = kTokens* kVecs > kSums ? 2 : 1;
constexpr int kFusedTokens = kVecs == 2 ? 12 : 6;  // most of one pass
// Independent multiply-adds that hide their latency, and streams of memory that hide theirs; fewer where
// decoding needs the registers.
template <class Rows>
inline constexpr int kChains = Rows::kScaled ? (kVecs == 2 ? 8 : 4) : (kVecs == 2 ? 16 : 8);

// One token's outputs of one panel; the last panel may have fewer than 32.
HWY_INLINE void StorePanel(const GemmParams& p, int64_t token, int64_t panel, const V* acc) {
  float* y = p.y + token * p.y_stride + panel * kPanel;
  const int64_t count = HWY_MIN(kPanel, p.w.rows - panel * kPanel);
  if (count == kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) hn::StoreU(acc[v], D(), y + v * kWidth);
    return;
  }
  HWY_ALIGN float buffer[kPanel];
  for (int v = 0; v < kVecs; ++v) hn::Store(acc[v], D(), buffer + v * kWidth);
  std::memcpy(y, buffer, static_cast<size_t>(count) * sizeof(float));
}

// sum += scale * block for the outputs that stand in `block`, of all tokens; the block starts anew.
template <int kTokens, int kCount>
HWY_INLINE void AddScaled(const V (&scale)[kCount], V (&block)[kTokens][kCount],
                          V (&sum)[kTokens][kCount]) {
#pragma GCC unroll 16
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kCount; ++v) {
      sum[t][v] = hn::MulAdd(block[t][v], scale[v], sum[t][v]);
      block[t][v] = hn::Zero(D());
    }
  }
}

// Registers kHalf, kHalf + kStep, ... of those that make a panel.
template <int kHalf, int kStep>
HWY_INLINE void Pick(const V (&all)[kVecs], V (&some)[kVecs / kStep]) {
#pragma GCC unroll 8
  for (int v = 0; v < kVecs / kStep; ++v) some[v] = all[kHalf + v * kStep];
}

template <class Rows, int kTokens, int kPanels, int kHalf, size_t... kIndex>
HWY_INLINE void FusedTile(const GemmParams& p, int64_t panel, V (&out)[kPanels][kTokens][kVecs],
                          std::index_sequence<kIndex...>) {
  constexpr int kStep = kHalves<kTokens>;
  constexpr int kCount = kVecs / kStep;
  Rows rows[kPanels] = {Rows(p.w, panel + static_cast<int64_t>(kIndex))...};
  V acc[kPanels][kTokens][kCount];
  V sum[kPanels][kTokens][kCount];  // of scaled blocks
  for (int i = 0; i < kPanels; ++i) {
    for (int t = 0; t < kTokens; ++t) {
      for (int v = 0; v < kCount; ++v) acc[i][t][v] = sum[i][t][v] = hn::Zero(D());
    }
  }
  for (int64_t k0 = 0; k0 < p.w.cols; k0 += kMxBlock) {
#pragma GCC unroll 8
    for (int i = 0; i < kPanels; ++i) {
      rows[i].Start(k0);
      if constexpr (Rows::kScaled) rows[i].FetchScales();
    }
    const float* x = p.x + k0;
    ForColumns(HWY_MIN(kMxBlock, p.w.cols - k0), [&](int64_t k, auto j) HWY_ATTR {
#pragma GCC unroll 8
      for (int i = 0; i < kPanels; ++i) {
        V all[kVecs], w[kCount];
        rows[i].Fetch(k, j);
        rows[i].Row(k, j, all);  // those that are not picked cost nothing
        Pick<kHalf, kStep>(all, w);
#pragma GCC unroll 16
        for (int t = 0; t < kTokens; ++t) {
          const V xk = hn::Set(D(), x[t * p.x_stride + k + j.value]);
#pragma GCC unroll 8
          for (int v = 0; v < kCount; ++v) acc[i][t][v] = hn::MulAdd(xk, w[v], acc[i][t][v]);
        }
      }
    });
    if constexpr (Rows::kScaled) {
#pragma GCC unroll 8
      for (int i = 0; i < kPanels; ++i) {
        V all[kVecs], scale[kCount];
        rows[i].Scales(all);
        Pick<kHalf, kStep>(all, scale);
        AddScaled<kTokens, kCount>(scale, acc[i], sum[i]);
      }
    }
  }
  for (int i = 0; i < kPanels; ++i) {
    for (int t = 0; t < kTokens; ++t) {
      for (int v = 0; v < kCount; ++v) {
        out[i][t][kHalf + v * kStep] = Rows::kScaled ? sum[i][t][v] : acc[i][t][v];
      }
    }
  }
}

template <class Rows, int kTokens, int kPanels>
HWY_INLINE void FusedTiles(const GemmParams& p, int64_t panel) {
  constexpr auto kIndex = std::make_index_sequence<kPanels>();
  V out[kPanels][kTokens][kVecs];
  FusedTile<Rows, kTokens, kPanels, 0>(p, panel, out, kIndex);
  if constexpr (kHalves<kTokens> == 2) FusedTile<Rows, kTokens, kPanels, 1>(p, panel, out, kIndex);
  for (int i = 0; i < kPanels; ++i) {
    for (int t = 0; t < kTokens; ++t) StorePanel(p, t, panel + i, out[i][t]);
  }
}

template <class Rows, int kTokens>
HWY_NOINLINE void FusedPanels(const GemmParams& p) {
  constexpr int kPanels = HWY_MAX(1, kChains<Rows> / (kTokens * kVecs));
  int64_t panel = p.panel_begin;
  for (; panel + kPanels <= p.panel_end; panel += kPanels) {
    FusedTiles<Rows, kTokens, kPanels>(p, panel);
  }
  for (; panel < p.panel_end; ++panel) FusedTiles<Rows, kTokens, 1>(p, panel);
}

// For 1 <= p.tokens <= kTokens.
template <class Rows, int kTokens = kFusedTokens>
HWY_INLINE void Fused(const GemmParams& p) {
  if (p.tokens == kTokens) return FusedPanels<Rows, kTokens>(p);
  if constexpr (kTokens > 1) Fused<Rows, kTokens - 1>(p);
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard

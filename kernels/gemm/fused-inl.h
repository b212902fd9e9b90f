// Few tokens: weights are decoded on the way into the multiply-adds and read once, some panels side
// by side so that enough chains are in flight. Included once per Highway target.
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

constexpr int kFusedTokens = kVecs == 2 ? 8 : 3;  // most that the registers hold
// Independent multiply-adds that hide their latency; fewer where decoding needs the registers.
template <class Rows>
inline constexpr int kChains = kVecs == 2 || !Rows::kScaled ? 8 : 4;

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

// sum += scale * block for one panel's outputs of all tokens; the block starts anew.
template <int kTokens>
HWY_INLINE void AddScaled(const V (&scale)[kVecs], V (&block)[kTokens][kVecs],
                          V (&sum)[kTokens][kVecs]) {
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      sum[t][v] = hn::MulAdd(block[t][v], scale[v], sum[t][v]);
      block[t][v] = hn::Zero(D());
    }
  }
}

template <class Rows, int kTokens, int kPanels, size_t... kIndex>
HWY_INLINE void FusedTile(const GemmParams& p, int64_t panel, std::index_sequence<kIndex...>) {
  Rows rows[kPanels] = {Rows(p.w, panel + static_cast<int64_t>(kIndex))...};
  V acc[kPanels][kTokens][kVecs];
  V sum[kPanels][kTokens][kVecs];  // of scaled blocks
  for (int i = 0; i < kPanels; ++i) {
    for (int t = 0; t < kTokens; ++t) {
      for (int v = 0; v < kVecs; ++v) acc[i][t][v] = sum[i][t][v] = hn::Zero(D());
    }
  }
  for (int64_t k0 = 0; k0 < p.w.cols; k0 += kMxBlock) {
#pragma GCC unroll 8
    for (int i = 0; i < kPanels; ++i) rows[i].Start(k0);
    const float* x = p.x + k0;
    ForColumns(HWY_MIN(kMxBlock, p.w.cols - k0), [&](int64_t k, auto j) HWY_ATTR {
#pragma GCC unroll 8
      for (int i = 0; i < kPanels; ++i) {
        V w[kVecs];
        rows[i].Row(k, j, w);
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
          const V xk = hn::Set(D(), x[t * p.x_stride + k + j.value]);
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v) acc[i][t][v] = hn::MulAdd(xk, w[v], acc[i][t][v]);
        }
      }
    });
    if constexpr (Rows::kScaled) {
#pragma GCC unroll 8
      for (int i = 0; i < kPanels; ++i) {
        V scale[kVecs];
        rows[i].Scales(scale);
        AddScaled<kTokens>(scale, acc[i], sum[i]);
      }
    }
  }
  for (int i = 0; i < kPanels; ++i) {
    for (int t = 0; t < kTokens; ++t) {
      StorePanel(p, t, panel + i, Rows::kScaled ? sum[i][t] : acc[i][t]);
    }
  }
}

template <class Rows, int kTokens>
HWY_NOINLINE void FusedPanels(const GemmParams& p) {
  constexpr int kPanels = HWY_MAX(1, kChains<Rows> / (kTokens * kVecs));
  int64_t panel = p.panel_begin;
  for (; panel + kPanels <= p.panel_end; panel += kPanels) {
    FusedTile<Rows, kTokens, kPanels>(p, panel, std::make_index_sequence<kPanels>());
  }
  for (; panel < p.panel_end; ++panel) {
    FusedTile<Rows, kTokens, 1>(p, panel, std::make_index_sequence<1>());
  }
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

// A panel of 32 outputs is a few registers wide, and each output lane is one chain over k. Few
// tokens: weights are decoded on the way into the multiply-adds and read once, several panels side
// by side so that enough chains are in flight. Many tokens: a stretch of k is decoded once into the
// first-level cache and used by all tokens of a block.
#include <cstring>
#include <type_traits>
#include <utility>

#include "kernels/base/simd_targets.h"
#include "kernels/gemm/gemm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gemm/gemm_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/gemm/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Tokens of a register tile: kVecs accumulators each, a panel's weights, and one input.
constexpr int kTileTokens = kVecs == 2 ? 8 : 3;
constexpr int kChains = 8;            // independent multiply-adds that hide their latency
constexpr int64_t kStretch = 128;     // columns decoded at a time
constexpr int64_t kBlockTokens = 64;  // tokens that share a decoded stretch

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

template <class Rows, int kTokens, int kPanels, size_t... kIndex>
HWY_INLINE void FusedTile(const GemmParams& p, int64_t token, int64_t panel,
                          std::index_sequence<kIndex...>) {
  Rows rows[kPanels] = {Rows(p.w, panel + static_cast<int64_t>(kIndex))...};
  V acc[kPanels][kTokens][kVecs];
  for (int i = 0; i < kPanels; ++i) {
    for (int t = 0; t < kTokens; ++t) {
      for (int v = 0; v < kVecs; ++v) acc[i][t][v] = hn::Zero(D());
    }
  }
  const float* x = p.x + token * p.x_stride;
  for (int64_t k0 = 0; k0 < p.w.cols; k0 += kMxBlock) {
    for (int i = 0; i < kPanels; ++i) rows[i].Start(k0);
    ForColumns(HWY_MIN(kMxBlock, p.w.cols - k0), [&](int64_t k, auto j) HWY_ATTR {
#pragma GCC unroll 8
      for (int i = 0; i < kPanels; ++i) {
        V w[kVecs];
        rows[i].template Row<j>(k, w);
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
          const V xk = hn::Set(D(), x[t * p.x_stride + k0 + k + j]);
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v) acc[i][t][v] = hn::MulAdd(xk, w[v], acc[i][t][v]);
        }
      }
    });
  }
  for (int i = 0; i < kPanels; ++i) {
    for (int t = 0; t < kTokens; ++t) StorePanel(p, token + t, panel + i, acc[i][t]);
  }
}

template <class Rows, int kTokens>
HWY_NOINLINE void FusedPanels(const GemmParams& p, int64_t token) {
  constexpr int kPanels = HWY_MAX(1, kChains / (kTokens * kVecs));
  int64_t panel = p.panel_begin;
  for (; panel + kPanels <= p.panel_end; panel += kPanels) {
    FusedTile<Rows, kTokens, kPanels>(p, token, panel, std::make_index_sequence<kPanels>());
  }
  for (; panel < p.panel_end; ++panel) {
    FusedTile<Rows, kTokens, 1>(p, token, panel, std::make_index_sequence<1>());
  }
}

// Continues `kTokens` rows of acc [.][32] over `count` columns of decoded weights [count][32].
template <int kTokens>
HWY_NOINLINE void StretchTile(const float* x, int64_t x_stride, const float* w, int64_t count,
                              float* acc) {
  V sum[kTokens][kVecs];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) sum[t][v] = hn::Load(D(), acc + t * kPanel + v * kWidth);
  }
  for (int64_t k = 0; k < count; ++k) {
    V wk[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) wk[v] = hn::LoadU(D(), w + k * kPanel + v * kWidth);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const V xk = hn::Set(D(), x[t * x_stride + k]);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) sum[t][v] = hn::MulAdd(xk, wk[v], sum[t][v]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) hn::Store(sum[t][v], D(), acc + t * kPanel + v * kWidth);
  }
}

// Calls the tile for the number of tokens left, 1 <= count <= kTileTokens.
template <int kTokens>
HWY_INLINE void AnyStretchTile(int64_t count, const float* x, int64_t x_stride, const float* w,
                               int64_t k, float* acc) {
  if (count == kTokens) return StretchTile<kTokens>(x, x_stride, w, k, acc);
  if constexpr (kTokens > 1) AnyStretchTile<kTokens - 1>(count, x, x_stride, w, k, acc);
}

template <class Rows>
HWY_INLINE void DecodeStretch(Rows& rows, int64_t k0, int64_t k1, float* out) {
  for (int64_t b0 = k0; b0 < k1; b0 += kMxBlock) {
    rows.Start(b0);
    float* block = out + (b0 - k0) * kPanel;
    ForColumns(HWY_MIN(kMxBlock, k1 - b0), [&](int64_t k, auto j) HWY_ATTR {
      V w[kVecs];
      rows.template Row<j>(k, w);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) hn::Store(w[v], D(), block + (k + j) * kPanel + v * kWidth);
    });
  }
}

template <class Rows>
HWY_NOINLINE void BlockPanel(const GemmParams& p, int64_t token, int64_t tokens, int64_t panel) {
  alignas(64) float weights[kStretch * kPanel];
  alignas(64) float acc[kBlockTokens * kPanel] = {};
  Rows rows(p.w, panel);
  for (int64_t k0 = 0; k0 < p.w.cols; k0 += kStretch) {
    const int64_t k1 = HWY_MIN(k0 + kStretch, p.w.cols);
    const float* w = weights;
    if constexpr (std::is_same_v<Rows, F32Rows>) {
      w = rows.base + k0 * kPanel;
    } else {
      DecodeStretch(rows, k0, k1, weights);
    }
    for (int64_t t = 0; t < tokens; t += kTileTokens) {
      AnyStretchTile<kTileTokens>(HWY_MIN(int64_t{kTileTokens}, tokens - t),
                                  p.x + (token + t) * p.x_stride + k0, p.x_stride, w, k1 - k0,
                                  acc + t * kPanel);
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    V row[kVecs];
    for (int v = 0; v < kVecs; ++v) row[v] = hn::Load(D(), acc + t * kPanel + v * kWidth);
    StorePanel(p, token + t, panel, row);
  }
}

template <class Rows, int kTokens>
HWY_INLINE void AnyFusedPanels(const GemmParams& p) {
  if (p.tokens == kTokens) return FusedPanels<Rows, kTokens>(p, 0);
  if constexpr (kTokens > 1) AnyFusedPanels<Rows, kTokens - 1>(p);
}

template <class Rows>
HWY_INLINE void GemmOf(const GemmParams& p) {
  if (p.tokens <= kTileTokens) return AnyFusedPanels<Rows, kTileTokens>(p);
  for (int64_t token = 0; token < p.tokens; token += kBlockTokens) {
    const int64_t tokens = HWY_MIN(kBlockTokens, p.tokens - token);
    for (int64_t panel = p.panel_begin; panel < p.panel_end; ++panel) {
      BlockPanel<Rows>(p, token, tokens, panel);
    }
  }
}

void GemmCpu(const GemmParams& p) {
  switch (p.w.format) {
    case WeightFormat::kF32:
      return GemmOf<F32Rows>(p);
    case WeightFormat::kBf16:
      return GemmOf<Bf16Rows>(p);
    case WeightFormat::kMxfp4:
      return GemmOf<MxRows>(p);
    case WeightFormat::kInt8:
      return GemmOf<Int8Rows>(p);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltamesh::kernels {

HWY_EXPORT(GemmCpu);

void Gemm(const GemmParams& p) { HWY_DYNAMIC_DISPATCH(GemmCpu)(p); }

}  // namespace deltamesh::kernels
#endif  // HWY_ONCE

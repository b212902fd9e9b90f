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
#include "kernels/gemm/mxfp4-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::CappedTag<float, 16>;
using V = hn::Vec<D>;
constexpr int kWidth = static_cast<int>(hn::MaxLanes(D()));
constexpr int kVecs = static_cast<int>(kPanel) / kWidth;  // registers of a panel
// Tokens of a register tile: kVecs accumulators each, a panel's weights, and one input.
constexpr int kTileTokens = kVecs == 2 ? 8 : 3;
constexpr int kChains = 8;            // independent multiply-adds that hide their latency
constexpr int64_t kStretch = 128;     // columns decoded at a time
constexpr int64_t kBlockTokens = 64;  // tokens that share a decoded stretch

// Byte i of every 32-bit lane to its top, zeros below.
alignas(16) constexpr uint8_t kInt8Pick[4][16] = {
    {128, 128, 128, 0, 128, 128, 128, 4, 128, 128, 128, 8, 128, 128, 128, 12},
    {128, 128, 128, 1, 128, 128, 128, 5, 128, 128, 128, 9, 128, 128, 128, 13},
    {128, 128, 128, 2, 128, 128, 128, 6, 128, 128, 128, 10, 128, 128, 128, 14},
    {128, 128, 128, 3, 128, 128, 128, 7, 128, 128, 128, 11, 128, 128, 128, 15}};

// Row sources: Start(k) before each multiple of 32, then Row(i, j) for the weights of column k + i + j,
// with i a multiple of 4 below 32, and j below 4 known when compiling.
struct F32Rows {
  explicit F32Rows(const PackedMatrix& m, int64_t panel)
      : base(reinterpret_cast<const float*>(m.data) + panel * m.cols * kPanel) {}
  HWY_INLINE void Start(int64_t k) { block = base + k * kPanel; }
  HWY_INLINE void Row(int64_t i, int j, V (&w)[kVecs]) const {
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
  HWY_INLINE void Row(int64_t i, int j, V (&w)[kVecs]) const {
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
  static constexpr int64_t kRowBytes = kPanel / 2;
  static constexpr int64_t kGroupBytes = kPanel + kMxBlock * kRowBytes;
  explicit MxRows(const PackedMatrix& m, int64_t panel)
      : base(reinterpret_cast<const uint8_t*>(m.data) + panel * (m.cols / kMxBlock) * kGroupBytes) {
  }
  HWY_INLINE void Start(int64_t k) {
    group = base + k / kMxBlock * kGroupBytes;
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      scale[v] = MxScales(D(), group + v * kWidth);
      // Halving is exact down to the least scale.
      if constexpr (kWidth == 8) scale[v] = hn::Mul(scale[v], hn::Set(D(), 0.5f));
    }
  }
  HWY_INLINE void Row(int64_t i, int j, V (&w)[kVecs]) const {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint8_t, D> d8;
    const uint8_t* row = group + kPanel + (i + j) * kRowBytes;
    if constexpr (kWidth == 8) {
      MxDoubledRow(D(), row, w);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) w[v] = hn::Mul(w[v], scale[v]);
      return;
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVecs / 2; ++v) {
      const auto pairs = hn::PromoteTo(du, hn::LoadU(d8, row + v * kWidth));
      const auto low = hn::And(pairs, hn::Set(du, 15u));
      const auto high = hn::ShiftRight<4>(pairs);
      w[v] = hn::Mul(MxDecode(D(), low), scale[v]);
      w[v + kVecs / 2] = hn::Mul(MxDecode(D(), high), scale[v + kVecs / 2]);
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
  HWY_INLINE void Row(int64_t i, int j, V (&w)[kVecs]) const {
    const hn::RebindToSigned<D> di;
    const hn::Repartition<uint8_t, D> d8;
    const uint8_t* row = group + kScaleBytes + i * kPanel;
    const auto pick = hn::LoadDup128(d8, kInt8Pick[j]);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      const auto codes = hn::TableLookupBytesOr0(hn::LoadU(d8, row + v * 4 * kWidth), pick);
      w[v] = hn::Mul(hn::ConvertTo(D(), hn::BitCast(di, codes)), scale[v]);
    }
  }
  const uint8_t* base;
  const uint8_t* group = nullptr;
  V scale[kVecs];
};

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
    const int64_t k1 = HWY_MIN(k0 + kMxBlock, p.w.cols);
    for (int i = 0; i < kPanels; ++i) rows[i].Start(k0);
    const auto column = [&](int64_t k, int j) HWY_ATTR {
#pragma GCC unroll 8
      for (int i = 0; i < kPanels; ++i) {
        V w[kVecs];
        rows[i].Row(k - k0, j, w);
#pragma GCC unroll 8
        for (int t = 0; t < kTokens; ++t) {
          const V xk = hn::Set(D(), x[t * p.x_stride + k + j]);
#pragma GCC unroll 8
          for (int v = 0; v < kVecs; ++v) acc[i][t][v] = hn::MulAdd(xk, w[v], acc[i][t][v]);
        }
      }
    };
    int64_t k = k0;
    for (; k + 4 <= k1; k += 4) {
      column(k, 0);
      column(k, 1);
      column(k, 2);
      column(k, 3);
    }
    for (int j = 0; k + j < k1; ++j) column(k, j);
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
    const auto column = [&](int64_t k, int j) HWY_ATTR {
      V w[kVecs];
      rows.Row(k - b0, j, w);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v)
        hn::Store(w[v], D(), out + (k + j - k0) * kPanel + v * kWidth);
    };
    const int64_t b1 = HWY_MIN(b0 + kMxBlock, k1);
    int64_t k = b0;
    for (; k + 4 <= b1; k += 4) {
      column(k, 0);
      column(k, 1);
      column(k, 2);
      column(k, 3);
    }
    for (int j = 0; k + j < b1; ++j) column(k, j);
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

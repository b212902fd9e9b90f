// Integer products of four columns at a time, 32 outputs of a panel in a few registers. Few tokens:
// weights go straight into the products and are read once. Many tokens: a stretch of k is decoded
// once into the first-level cache and used by all tokens of a block.
#include <atomic>
#include <cstring>
#include <utility>

#include "kernels/base/simd_targets.h"
#include "kernels/gemm/int8_activations.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gemm/int8_cpu.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/gemm/fetch.h"
#include "kernels/gemm/int8_ops-inl.h"
#include "kernels/gemm/mxfp4-inl.h"

namespace deltamesh::kernels {
// Whether to multiply bytes in registers of 64 bytes (wide) or 32.
}  // namespace deltamesh::kernels

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kStretch = 4;       // blocks of 32 columns decoded at a time
constexpr int64_t kBlockTokens = 96;  // tokens that share a decoded stretch
constexpr int kStreamRows = 4;        // most rows of sums of all panels that are read side by side

// Tokens of the next piece when `left` are cut into as few and as equal pieces of at most `most` as
// can be.
HWY_INLINE int64_t Piece(int64_t left, int64_t most) {
  const int64_t pieces = (left + most - 1) / most;
  return (left + pieces - 1) / pieces;
}

// Weight sources: Start before each block of 32 columns gives the scales, then Row(r) the bytes of its
// columns 4 r to 4 r + 3, through Ops::Bias. FetchScales and Fetch(r) ask for the same further on.
template <class Ops>
struct Int8Source {
  static constexpr int64_t kScaleBytes = 2 * kPanel;
  static constexpr int64_t kGroupBytes = kScaleBytes + kMxBlock * kPanel;
  Int8Source(const PackedMatrix& m, int64_t panel)
      : base(reinterpret_cast<const uint8_t*>(m.data) + panel * (m.cols / kMxBlock) * kGroupBytes) {
  }
  HWY_INLINE void Start(int64_t g, VF (&scale)[kVecs]) {
    const hn::RebindToUnsigned<DF> du;
    const hn::Rebind<uint16_t, DF> d16;
    group = base + g * kGroupBytes;
    const auto* scales = reinterpret_cast<const uint16_t*>(group);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      const auto bits = hn::PromoteTo(du, hn::LoadU(d16, scales + v * kWidth));
      scale[v] = hn::BitCast(DF(), hn::ShiftLeft<16>(bits));
    }
  }
  HWY_INLINE void FetchScales() const { FetchAhead(group); }
  HWY_INLINE void Fetch(int64_t r) const {
    FetchAhead(group + kScaleBytes + r * 4 * kPanel);
    FetchAhead(group + kScaleBytes + r * 4 * kPanel + 64);
  }
  HWY_INLINE void Row(int64_t r, VI (&w)[kVecs]) const {
    const uint8_t* row = group + kScaleBytes + r * 4 * kPanel;
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      const auto bytes = hn::LoadU(D8(), row + v * 4 * kWidth);
      w[v] = hn::BitCast(DI(), Ops::Bias(bytes));
    }
  }
  const uint8_t* base;
  const uint8_t* group = nullptr;
};

template <class Ops>
struct MxSource {
  static constexpr int64_t kGroupBytes = kPanel + kMxBlock * kPanel / 2;
  MxSource(const PackedMatrix& m, int64_t panel)
      : base(reinterpret_cast<const uint8_t*>(m.data) + panel * (m.cols / kMxBlock) * kGroupBytes) {
  }
  HWY_INLINE void Start(int64_t g, VF (&scale)[kVecs]) {
    group = base + g * kGroupBytes;
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      scale[v] = hn::Mul(MxScales(DF(), group + v * kWidth), hn::Set(DF(), 0.5f));
    }
  }
  HWY_INLINE void FetchScales() const { FetchAhead(group); }
  HWY_INLINE void Fetch(int64_t r) const { FetchAhead(group + kPanel + r * 2 * kPanel); }
  // Low nibbles are outputs of the panel's first half, high ones of its second.
  HWY_INLINE void Row(int64_t r, VI (&w)[kVecs]) const {
    const uint8_t* row = group + kPanel + r * 2 * kPanel;
    const auto values = Ops::Bias(hn::LoadDup128(D8(), kMxDoubled));
    const auto nibble = hn::Set(D8(), uint8_t{15});
#pragma GCC unroll 8
    for (int v = 0; v < kVecs / 2; ++v) {
      const auto pairs = hn::LoadU(D8(), row + v * 4 * kWidth);
      const auto low = hn::And(pairs, nibble);
      const auto high = hn::And(hn::ShiftRight<4>(pairs), nibble);
      w[v] = hn::BitCast(DI(), hn::TableLookupBytes(values, low));
      w[v + kVecs / 2] = hn::BitCast(DI(), hn::TableLookupBytes(values, high));
    }
  }
  const uint8_t* base;
  const uint8_t* group = nullptr;
};

// Rows of x in memory.
struct Rows {
  Rows(const Int8GemmParams& p, int64_t token)
      : row_bytes(Int8RowBytes(p.w.cols)),
        base(p.x + token * row_bytes),
        scales(p.w.cols),
        offsets(p.w.cols + p.w.cols / kMxBlock * 4) {}
  HWY_INLINE const int8_t* Codes(int64_t t, int64_t g) const {
    return reinterpret_cast<const int8_t*>(base + t * row_bytes + g * kMxBlock);
  }
  HWY_INLINE VF Scale(int64_t t, int64_t g) const {
    return hn::Set(DF(), *reinterpret_cast<const float*>(base + t * row_bytes + scales + 4 * g));
  }
  // Where isum starts.
  template <class Ops>
  HWY_INLINE VI Offset(int64_t t, int64_t g) const {
    return Ops::Offset(reinterpret_cast<const int32_t*>(base + t * row_bytes + offsets + 4 * g));
  }
  int64_t row_bytes;
  const std::byte* base;
  int64_t scales, offsets;
};

// One token's outputs of one panel; the last panel may have fewer than 32.
HWY_INLINE void StorePanel(const Int8GemmParams& p, int64_t token, int64_t panel, const VF* sum) {
  float* y = p.y + token * p.y_stride + panel * kPanel;
  const int64_t count = HWY_MIN(kPanel, p.w.rows - panel * kPanel);
  if (count == kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) hn::StoreU(sum[v], DF(), y + v * kWidth);
    return;
  }
  HWY_ALIGN float buffer[kPanel];
  for (int v = 0; v < kVecs; ++v) hn::Store(sum[v], DF(), buffer + v * kWidth);
  std::memcpy(y, buffer, static_cast<size_t>(count) * sizeof(float));
}

// Adds the products of all rows of a block to isum; row(r, acc) adds those of one to acc.
template <class Ops, int kTokens, class Row>
HWY_INLINE void AddRows(const Row& row, VI (&isum)[kTokens][kVecs]) {
#pragma GCC unroll 8
  for (int begin = 0; begin < kRows; begin += Ops::kRun) {
    VI acc[kTokens][kVecs];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) acc[t][v] = Ops::Begin(isum[t][v]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Ops::kRun; ++r) row(begin + r, acc);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) isum[t][v] = Ops::Fold(isum[t][v], acc[t][v]);
    }
  }
}

// Adds a finished block to the chains of a tile.
template <int kTokens>
HWY_INLINE void AddBlock(const Rows& rows, int64_t token, int64_t g,
                         const VI (&isum)[kTokens][kVecs], const VF (&scale)[kVecs],
                         VF (&sum)[kTokens][kVecs]) {
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
    const VF xs = rows.Scale(token + t, g);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) {
      sum[t][v] = hn::MulAdd(hn::ConvertTo(DF(), isum[t][v]), hn::Mul(xs, scale[v]), sum[t][v]);
    }
  }
}

// Adds the products of block g of one panel.
template <class Ops, class Source, int kTokens>
HWY_INLINE void FusedBlock(const Rows& rows, int64_t g, Source& source, VF (&sum)[kTokens][kVecs]) {
  VF scale[kVecs];
  source.Start(g, scale);
  source.FetchScales();
  VI isum[kTokens][kVecs];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) isum[t][v] = rows.template Offset<Ops>(t, g);
  }
  const auto row = [&](int r, VI(&acc)[kTokens][kVecs]) HWY_ATTR {
    VI bytes[kVecs], w[kVecs][Ops::kW];
    source.Fetch(r);
    source.Row(r, bytes);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) Ops::Split(bytes[v], w[v]);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      VI x[Ops::kX];
      Ops::Spread(rows.Codes(t, g) + 4 * r, x);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) acc[t][v] = Ops::Dot(acc[t][v], w[v], x);
    }
  };
  AddRows<Ops, kTokens>(row, isum);
  AddBlock<kTokens>(rows, 0, g, isum, scale, sum);
}

// Panels side by side: their blocks take turns, so that memory has several streams to work on.
template <class Ops, class Source, int kTokens, int kPanels, size_t... kIndex>
HWY_INLINE void FusedTile(const Int8GemmParams& p, int64_t panel, std::index_sequence<kIndex...>) {
  const Rows rows(p, 0);
  const int64_t groups = p.w.cols / kMxBlock;
  Source sources[kPanels] = {Source(p.w, panel + static_cast<int64_t>(kIndex))...};
  VF sum[kPanels][kTokens][kVecs];
  for (int i = 0; i < kPanels; ++i) {
    for (int t = 0; t < kTokens; ++t) {
      for (int v = 0; v < kVecs; ++v) sum[i][t][v] = hn::Zero(DF());
    }
  }
  for (int64_t g = 0; g < groups; ++g) {
#pragma GCC unroll 8
    for (int i = 0; i < kPanels; ++i) {
      FusedBlock<Ops>(rows, g, sources[i], sum[i]);
    }
  }
  for (int i = 0; i < kPanels; ++i) {
    for (int t = 0; t < kTokens; ++t) StorePanel(p, t, panel + i, sum[i][t]);
  }
}

template <class Ops, class Source, int kTokens>
HWY_NOINLINE void FusedPanels(const Int8GemmParams& p) {
  constexpr int kPanels = HWY_MAX(1, kStreamRows / kTokens);
  int64_t panel = p.panel_begin;
  for (; panel + kPanels <= p.panel_end; panel += kPanels) {
    FusedTile<Ops, Source, kTokens, kPanels>(p, panel, std::make_index_sequence<kPanels>());
  }
  for (; panel < p.panel_end; ++panel) {
    FusedTile<Ops, Source, kTokens, 1>(p, panel, std::make_index_sequence<1>());
  }
}

// A stretch of one panel in the first-level cache.
template <class Ops>
struct Stretch {
  alignas(64) int32_t w[kStretch][kRows][kVecs * Ops::kW * kWidth];
  alignas(64) float scale[kStretch][kPanel];
};

template <class Ops, class Source>
HWY_INLINE void DecodeStretch(Source& source, int64_t g0, int64_t g1, Stretch<Ops>& out) {
  for (int64_t g = g0; g < g1; ++g) {
    // The products of this stretch give the memory time for the next one.
    const uint8_t* next = source.base + (g + kStretch) * Source::kGroupBytes;
    for (int64_t i = 0; i < Source::kGroupBytes; i += 64) hwy::Prefetch(next + i);
    VF scale[kVecs];
    source.Start(g, scale);
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) hn::Store(scale[v], DF(), out.scale[g - g0] + v * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      VI bytes[kVecs];
      source.Row(r, bytes);
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        VI w[Ops::kW];
        Ops::Split(bytes[v], w);
        for (int i = 0; i < Ops::kW; ++i) {
          hn::Store(w[i], DI(), out.w[g - g0][r] + (v * Ops::kW + i) * kWidth);
        }
      }
    }
  }
}

// Continues the chains of `kTokens` rows, acc [.][32], over blocks [g0, g1).
template <class Ops, int kTokens>
HWY_NOINLINE void StretchTile(const Rows& rows, int64_t token, const Stretch<Ops>& stretch,
                              int64_t g0, int64_t g1, float* acc) {
  constexpr int64_t kLine = kStretch * kRows;
  [[maybe_unused]] alignas(64) int32_t prepared[kTokens][Ops::kX * kLine];
  if constexpr (Ops::kPrepares) {
    for (int t = 0; t < kTokens; ++t) {
      for (int64_t g = g0; g < g1; ++g) {
        Ops::Prepare(rows.Codes(token + t, g), prepared[t] + (g - g0) * kRows, kLine);
      }
    }
  }
  VF sum[kTokens][kVecs];
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) sum[t][v] = hn::Load(DF(), acc + t * kPanel + v * kWidth);
  }
  for (int64_t g = g0; g < g1; ++g) {
    VI isum[kTokens][kVecs];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) isum[t][v] = rows.template Offset<Ops>(token + t, g);
    }
    const auto row = [&](int r, VI(&acc)[kTokens][kVecs]) HWY_ATTR {
      VI w[kVecs][Ops::kW];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        for (int i = 0; i < Ops::kW; ++i) {
          w[v][i] = hn::Load(DI(), stretch.w[g - g0][r] + (v * Ops::kW + i) * kWidth);
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        VI x[Ops::kX];
        if constexpr (Ops::kPrepares) {
          const int32_t* lane = prepared[t] + (g - g0) * kRows + r;
          for (int i = 0; i < Ops::kX; ++i) x[i] = hn::Set(DI(), lane[i * kLine]);
        } else {
          Ops::Spread(rows.Codes(token + t, g) + 4 * r, x);
        }
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) acc[t][v] = Ops::Dot(acc[t][v], w[v], x);
      }
    };
    AddRows<Ops, kTokens>(row, isum);
    VF scale[kVecs];
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) scale[v] = hn::Load(DF(), stretch.scale[g - g0] + v * kWidth);
    AddBlock<kTokens>(rows, token, g, isum, scale, sum);
  }
#pragma GCC unroll 8
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVecs; ++v) hn::Store(sum[t][v], DF(), acc + t * kPanel + v * kWidth);
  }
}

// Calls the tile for `count` tokens, 1 <= count <= kTokens.
template <class Ops, int kTokens>
HWY_INLINE void AnyStretchTile(int64_t count, const Rows& rows, int64_t token,
                               const Stretch<Ops>& stretch, int64_t g0, int64_t g1, float* acc) {
  if (count == kTokens) return StretchTile<Ops, kTokens>(rows, token, stretch, g0, g1, acc);
  if constexpr (kTokens > 1) {
    AnyStretchTile<Ops, kTokens - 1>(count, rows, token, stretch, g0, g1, acc);
  }
}

template <class Ops, class Source>
HWY_NOINLINE void BlockPanel(const Int8GemmParams& p, int64_t token, int64_t tokens,
                             int64_t panel) {
  Stretch<Ops> stretch;
  alignas(64) float acc[kBlockTokens * kPanel];
  std::memset(acc, 0, static_cast<size_t>(tokens * kPanel) * sizeof(float));
  Source source(p.w, panel);
  const Rows rows(p, token);
  const int64_t groups = p.w.cols / kMxBlock;
  for (int64_t g0 = 0; g0 < groups; g0 += kStretch) {
    const int64_t g1 = HWY_MIN(g0 + kStretch, groups);
    DecodeStretch<Ops>(source, g0, g1, stretch);
    for (int64_t t = 0, n; t < tokens; t += n) {
      n = Piece(tokens - t, Ops::kTileTokens);
      AnyStretchTile<Ops, Ops::kTileTokens>(n, rows, t, stretch, g0, g1, acc + t * kPanel);
    }
  }
  for (int64_t t = 0; t < tokens; ++t) {
    VF row[kVecs];
    for (int v = 0; v < kVecs; ++v) row[v] = hn::Load(DF(), acc + t * kPanel + v * kWidth);
    StorePanel(p, token + t, panel, row);
  }
}

template <class Ops, class Source, int kTokens>
HWY_INLINE void AnyFusedPanels(const Int8GemmParams& p) {
  if (p.tokens == kTokens) return FusedPanels<Ops, Source, kTokens>(p);
  if constexpr (kTokens > 1) AnyFusedPanels<Ops, Source, kTokens - 1>(p);
}

template <class Ops, class Source>
HWY_INLINE void GemmOf(const Int8GemmParams& p) {
  if (p.tokens <= Ops::kFusedTokens) return AnyFusedPanels<Ops, Source, Ops::kFusedTokens>(p);
  for (int64_t token = 0, tokens; token < p.tokens; token += tokens) {
    tokens = Piece(p.tokens - token, kBlockTokens);
    for (int64_t panel = p.panel_begin; panel < p.panel_end; ++panel) {
      BlockPanel<Ops, Source>(p, token, tokens, panel);
    }
  }
}

template <class Int8Ops, class MxOps>
HWY_INLINE void GemmWith(const Int8GemmParams& p) {
  HWY_ASSERT(TakesInt8(p.w.format));
  if (p.w.format == WeightFormat::kInt8) return GemmOf<Int8Ops, Int8Source<Int8Ops>>(p);
  return GemmOf<MxOps, MxSource<MxOps>>(p);
}

void Int8GemmCpu(const Int8GemmParams& p) {
#if HWY_ARCH_X86
  if (HasByteProducts(kWidth == 16)) return GemmWith<ByteOps, ByteOps>(p);
  return GemmWith<WordOps, SmallOps>(p);
#else
  return GemmWith<LaneOps, LaneOps>(p);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltamesh::kernels {

namespace {
std::atomic<ByteProducts> g_byte_products = ByteProducts::kByItself;
}

bool HasByteProducts(bool wide) {
  const ByteProducts use = g_byte_products.load(std::memory_order_relaxed);
  if (use == ByteProducts::kNever) return false;
#if HWY_ARCH_X86
  static const bool in_wide = __builtin_cpu_supports("avx512vnni");
  static const bool in_narrow = __builtin_cpu_supports("avxvnni");
  static const bool only_narrow = in_narrow && !__builtin_cpu_supports("avx512bw");
  if (wide) return in_wide;
  return use == ByteProducts::kWhereverThere ? in_narrow : only_narrow;
#else
  (void)wide;
  return false;
#endif
}

HWY_EXPORT(Int8GemmCpu);

void Int8Gemm(const Int8GemmParams& p) { HWY_DYNAMIC_DISPATCH(Int8GemmCpu)(p); }
void UseByteProductsForTest(ByteProducts use) { g_byte_products = use; }

}  // namespace deltamesh::kernels
#endif  // HWY_ONCE

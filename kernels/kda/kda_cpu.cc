// One head at a time, and all tokens up to the next tile boundary together: their decayed keys and
// queries pass through S as the rows of one small product, so S is read once per tile. What is
// sequential - a token's row needs the rows before it - touches the open rows only.
#include <cstring>

#include "kernels/base/simd_targets.h"
#include "kernels/kda/kda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/kda/kda_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/base/lanes-inl.h"
#include "kernels/base/math-inl.h"
#include "kernels/base/product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

struct Head {
  float *s, *decay, *khat, *u;
  int64_t dim;
};

// Tokens of one head up to the next boundary.
struct Tile {
  const float *q, *k, *v, *a;  // [tokens][dim], stride
  int64_t stride;
  const float* beta;  // [tokens], beta_stride
  int64_t beta_stride;
  float* o;  // [tokens][dim], o_stride
  int64_t o_stride;
  int64_t tokens, open;  // open: rows before the first token
};

struct Scratch {
  float kd[kTile][kMaxKdaDim], qd[kTile][kMaxKdaDim];  // decay * k, decay * q
  float past[kTile][kTile], look[kTile][kTile];        // weights of the open rows
};

HWY_NOINLINE void DecayedReads(const Head& h, const Tile& tile, Scratch& scratch) {
  ForVectors(0, h.dim, [&](int64_t d, int64_t count) HWY_ATTR {
    VF decay = LoadUpTo(h.decay + d, count);
    for (int64_t t = 0; t < tile.tokens; ++t) {
      const int64_t at = t * tile.stride + d;
      decay = hn::Mul(decay, LoadUpTo(tile.a + at, count));
      StoreUpTo(hn::Mul(decay, LoadUpTo(tile.k + at, count)), scratch.kd[t] + d, count);
      StoreUpTo(hn::Mul(decay, LoadUpTo(tile.q + at, count)), scratch.qd[t] + d, count);
    }
    StoreUpTo(decay, h.decay + d, count);
  });
}

// Decays the keys over kTokens tokens from `first`, inserting each token's own, and sums the weights of
// all 16 rows at once; those of rows not open yet are not used.
template <int kTokens>
HWY_NOINLINE void RowWeights(const Head& h, const Tile& tile, int64_t first, Scratch& scratch) {
  const DF df;
  VF past[kTokens][kLaneVectors], look[kTokens][kLaneVectors];
  hn::Mask<DF> own[kTokens][kLaneVectors];
  for (int t = 0; t < kTokens; ++t) {
    const VF row = hn::Set(df, static_cast<float>(tile.open + first + t));
    for (int j = 0; j < kLaneVectors; ++j) {
      past[t][j] = look[t][j] = hn::Zero(df);
      own[t][j] = hn::Eq(hn::Iota(df, static_cast<float>(j * kN)), row);
    }
  }
  const int64_t at = first * tile.stride;
  for (int64_t d = 0; d < h.dim; ++d) {
    VF row[kLaneVectors];
    for (int j = 0; j < kLaneVectors; ++j) row[j] = hn::LoadU(df, h.khat + d * kTile + j * kN);
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      const int64_t i = at + t * tile.stride + d;
      const VF a = hn::Set(df, tile.a[i]), k = hn::Set(df, tile.k[i]), q = hn::Set(df, tile.q[i]);
#pragma GCC unroll 4
      for (int j = 0; j < kLaneVectors; ++j) {
        row[j] = hn::Mul(row[j], a);
        past[t][j] = hn::MulAdd(k, row[j], past[t][j]);
        row[j] = hn::IfThenElse(own[t][j], k, row[j]);
        look[t][j] = hn::MulAdd(q, row[j], look[t][j]);
      }
    }
    for (int j = 0; j < kLaneVectors; ++j) hn::StoreU(row[j], df, h.khat + d * kTile + j * kN);
  }
  for (int t = 0; t < kTokens; ++t) {
    for (int j = 0; j < kLaneVectors; ++j) {
      hn::StoreU(past[t][j], df, scratch.past[first + t] + j * kN);
      hn::StoreU(look[t][j], df, scratch.look[first + t] + j * kN);
    }
  }
}

// S read by every decayed key (into the token's row of u) and query (into o).
HWY_NOINLINE void ReadState(const Head& h, const Tile& tile, const Scratch& scratch) {
  const float* x[2 * kTile];
  float* y[2 * kTile];
  for (int64_t t = 0; t < tile.tokens; ++t) {
    x[2 * t] = scratch.kd[t];
    y[2 * t] = h.u + (tile.open + t) * h.dim;
    x[2 * t + 1] = scratch.qd[t];
    y[2 * t + 1] = tile.o + t * tile.o_stride;
  }
  Product<ChainStart::kZero>({.x = x,
                              .w = h.s,
                              .w_stride = h.dim,
                              .scale = nullptr,
                              .y = y,
                              .rows = 2 * tile.tokens,
                              .k = h.dim,
                              .cols = h.dim});
}

// y continues over the first `rows` open rows.
HWY_INLINE void AddRows(const Head& h, const float* weights, int64_t rows, float* y) {
  Product<ChainStart::kKeep>({.x = &weights,
                              .w = h.u,
                              .w_stride = h.dim,
                              .scale = nullptr,
                              .y = &y,
                              .rows = 1,
                              .k = rows,
                              .cols = h.dim});
}

HWY_NOINLINE void FinishRows(const Head& h, const Tile& tile, const Scratch& scratch) {
  for (int64_t t = 0; t < tile.tokens; ++t) {
    const int64_t n = tile.open + t;
    float* u = h.u + n * h.dim;
    AddRows(h, scratch.past[t], n, u);
    const VF beta = hn::Set(DF(), tile.beta[t * tile.beta_stride]);
    const float* v = tile.v + t * tile.stride;
    ForVectors(0, h.dim, [&](int64_t i, int64_t count) HWY_ATTR {
      const VF error = hn::Sub(LoadUpTo(v + i, count), LoadUpTo(u + i, count));
      StoreUpTo(hn::Mul(beta, error), u + i, count);
    });
    AddRows(h, scratch.look[t], n + 1, tile.o + t * tile.o_stride);
  }
}

HWY_NOINLINE void Fold(const Head& h) {
  const float* x[kMaxKdaDim];
  float* y[kMaxKdaDim];
  for (int64_t d = 0; d < h.dim; ++d) {
    x[d] = h.khat + d * kTile;
    y[d] = h.s + d * h.dim;
  }
  Product<ChainStart::kScale>({.x = x,
                               .w = h.u,
                               .w_stride = h.dim,
                               .scale = h.decay,
                               .y = y,
                               .rows = h.dim,
                               .k = kTile,
                               .cols = h.dim});
  for (int64_t d = 0; d < h.dim; ++d) h.decay[d] = 1.0f;
  const size_t bytes = static_cast<size_t>(kTile * h.dim) * sizeof(float);
  std::memset(h.khat, 0, bytes);
  std::memset(h.u, 0, bytes);
}

HWY_INLINE void AdvanceTile(const Head& h, const Tile& tile, Scratch& scratch) {
  constexpr int kTogether = kLaneVectors == 1 ? 4 : 2;  // as many as the registers hold
  DecayedReads(h, tile, scratch);
  int64_t t = 0;
  for (; t + kTogether <= tile.tokens; t += kTogether) {
    RowWeights<kTogether>(h, tile, t, scratch);
  }
  for (; t < tile.tokens; ++t) RowWeights<1>(h, tile, t, scratch);
  ReadState(h, tile, scratch);
  FinishRows(h, tile, scratch);
  if (tile.open + tile.tokens == kTile) Fold(h);
}

void KdaAdvanceCpu(const KdaAdvanceParams& p) {
  HWY_ASSERT(p.dim <= kMaxKdaDim);
  Scratch scratch;
  for (int64_t head = p.head_begin; head < p.head_end; ++head) {
    const Head h = {.s = p.state.s + head * p.dim * p.dim,
                    .decay = p.state.decay + head * p.dim,
                    .khat = p.state.khat + head * p.dim * kTile,
                    .u = p.state.u + head * kTile * p.dim,
                    .dim = p.dim};
    int64_t open = p.open_rows;
    for (int64_t t = 0; t < p.tokens;) {
      const int64_t at = t * p.stride + head * p.dim;
      const Tile tile = {.q = p.q + at,
                         .k = p.k + at,
                         .v = p.v + at,
                         .a = p.a + at,
                         .stride = p.stride,
                         .beta = p.beta + t * p.beta_stride + head,
                         .beta_stride = p.beta_stride,
                         .o = p.o + t * p.o_stride + head * p.dim,
                         .o_stride = p.o_stride,
                         .tokens = HWY_MIN(kTile - open, p.tokens - t),
                         .open = open};
      AdvanceTile(h, tile, scratch);
      t += tile.tokens;
      open = (open + tile.tokens) % kTile;
    }
  }
}

void KdaDecayCpu(const KdaDecayParams& p) {
  const DF d;
  for (int64_t t = 0; t < p.tokens; ++t) {
    const float* z_row = p.z + t * p.z_stride;
    float* a_row = p.a + t * p.a_stride;
    for (int64_t head = p.head_begin; head < p.head_end; ++head) {
      const float scale = p.a_scale[head];
      ForVectors(head * p.dim, (head + 1) * p.dim, [&](int64_t c, int64_t count) HWY_ATTR {
        const VF z = hn::Add(LoadUpTo(z_row + c, count), LoadUpTo(p.dt_bias + c, count));
        const VF g = p.bounded ? hn::Mul(hn::Set(d, p.lower_bound),
                                         Sigmoid(d, hn::Mul(hn::Set(d, scale), z)))
                               : hn::Mul(hn::Set(d, -scale), Softplus(d, z));
        StoreUpTo(Exp(d, g), a_row + c, count);
      });
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltamesh::kernels {

HWY_EXPORT(KdaAdvanceCpu);
HWY_EXPORT(KdaDecayCpu);

void KdaAdvance(const KdaAdvanceParams& p) { HWY_DYNAMIC_DISPATCH(KdaAdvanceCpu)(p); }
void KdaDecay(const KdaDecayParams& p) { HWY_DYNAMIC_DISPATCH(KdaDecayCpu)(p); }

}  // namespace deltamesh::kernels
#endif  // HWY_ONCE

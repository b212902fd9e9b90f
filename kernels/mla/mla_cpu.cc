// Pairs pass in groups over each block, so a latent row that was loaded serves many queries: first all
// scores of the block, then its softmax, then the weighted sum of its rows as a small product.
#include <cmath>
#include <limits>

#include "kernels/base/simd_targets.h"
#include "kernels/mla/mla.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/mla/mla_cpu.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/base/lanes-inl.h"
#include "kernels/base/math-inl.h"
#include "kernels/base/product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kGroup = 16;                          // pairs that pass over a block together
constexpr int64_t kScorePositions = 4;                  // rows of a score tile, reduced together
constexpr int kScorePairs = kLaneVectors == 1 ? 4 : 1;  // pairs of a score tile

struct Dims {
  int64_t rank, rope, width;
  float scale;
};

// A running softmax; its weighted sum of latents is in `acc`.
struct Running {
  float m, l;
  float* acc;
};

// Consecutive pairs; positions never decrease from one to the next.
struct Group {
  int64_t size;
  const float* latent[kGroup];
  const float* rope[kGroup];
  int64_t positions[kGroup];  // that the pair may see
  Running total[kGroup];
};

struct Scratch {
  alignas(64) float e[kGroup][kBlock];  // scores, then their exponentials
  alignas(64) float acc[kGroup][kMaxRank];
};

template <int kPairs>
HWY_INLINE void ScoreStep(Lanes (&lanes)[kPairs][kScorePositions], const float* const* q,
                          const float* const* rows, int64_t at_q, int64_t at_row, int64_t count) {
#pragma GCC unroll 4
  for (int i = 0; i < kPairs; ++i) {
#pragma GCC unroll 4
    for (int s = 0; s < kScorePositions; ++s) {
      if (count == kLanes) {
        lanes[i][s].MulAdd(q[i] + at_q, rows[s] + at_row);
      } else {
        lanes[i][s].MulAddPart(q[i] + at_q, rows[s] + at_row, count);
      }
    }
  }
}

// kAhead: also fetch the same stretch of the tile's next four rows. The rows are too short for the
// hardware to notice a stream.
template <bool kAhead, int kPairs>
HWY_INLINE void ScorePart(Lanes (&lanes)[kPairs][kScorePositions], const float* const* q,
                          const float* const* rows, int64_t row_begin, int64_t size,
                          int64_t ahead) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    if (kAhead) {
      for (int s = 0; s < kScorePositions; ++s) hwy::Prefetch(rows[s] + row_begin + i + ahead);
    }
    ScoreStep(lanes, q, rows, i, row_begin + i, kLanes);
  }
  if (i < size) ScoreStep(lanes, q, rows, i, row_begin + i, size - i);
}

// Scores of kPairs pairs from `pair` on against four rows, to e[pair][s .. s + 4).
template <bool kAhead, int kPairs>
HWY_INLINE void ScoreTile(const Dims& dims, const Group& group, int64_t pair,
                          const float* const* rows, int64_t s, Scratch& scratch) {
  Lanes lanes[kPairs][kScorePositions];
  const int64_t ahead = kScorePositions * dims.width;
  ScorePart<kAhead>(lanes, group.latent + pair, rows, 0, dims.rank, ahead);
  ScorePart<kAhead>(lanes, group.rope + pair, rows, dims.rank, dims.rope, ahead);
  const D4 d4;
  for (int i = 0; i < kPairs; ++i) {
    const V4 sums = Reduce4(lanes[i][0], lanes[i][1], lanes[i][2], lanes[i][3]);
    hn::Store(hn::Mul(sums, hn::Set(d4, dims.scale)), d4, scratch.e[pair + i] + s);
  }
}

// Scores of pairs [begin, size) against the first `count` rows; some more of e is overwritten.
HWY_NOINLINE void ScoreBlock(const Dims& dims, const Group& group, int64_t begin,
                             const float* block, int64_t count, Scratch& scratch) {
  for (int64_t s = 0; s < count; s += kScorePositions) {
    const float* rows[kScorePositions];
    // A row beyond the last visible one may not be written yet: the last one stands in for it.
    for (int64_t i = 0; i < kScorePositions; ++i) {
      rows[i] = block + HWY_MIN(s + i, count - 1) * dims.width;
    }
    int64_t pair = begin;
    if (pair + kScorePairs <= group.size) {
      ScoreTile<true, kScorePairs>(dims, group, pair, rows, s, scratch);
      pair += kScorePairs;
    }
    for (; pair + kScorePairs <= group.size; pair += kScorePairs) {
      ScoreTile<false, kScorePairs>(dims, group, pair, rows, s, scratch);
    }
    for (; pair < group.size; ++pair) ScoreTile<false, 1>(dims, group, pair, rows, s, scratch);
  }
}

// Turns the first `count` scores into exponentials and takes their sum; returns the factor of what the
// span held before.
HWY_INLINE float SoftmaxBlock(float* e, int64_t count, bool first, Running& span) {
  const DF d;
  for (int64_t s = count; s < kBlock; ++s) e[s] = -std::numeric_limits<float>::infinity();
  VF most = hn::Load(d, e);
  for (int64_t s = kN; s < kBlock; s += kN) most = hn::Max(most, hn::Load(d, e + s));
  float m = hn::GetLane(hn::MaxOfLanes(d, most));
  if (!first && span.m > m) m = span.m;
  Lanes sums;
  for (int64_t s = 0; s < kBlock; s += kLanes) {
    VF x[kLaneVectors];
    for (int j = 0; j < kLaneVectors; ++j) {
      x[j] = Exp(d, hn::Sub(hn::Load(d, e + s + j * kN), hn::Set(d, m)));
      hn::Store(x[j], d, e + s + j * kN);
    }
    sums.Add(x);
  }
  const float sum = Reduce(sums);
  const float f = first ? 0.0f : kernels::Exp(span.m - m);
  span.l = first ? sum : std::fma(span.l, f, sum);
  span.m = m;
  return f;
}

HWY_INLINE int64_t Visible(const Group& group, int64_t pair, int64_t block) {
  return HWY_MIN(group.positions[pair] - block * kBlock, kBlock);
}

// acc of pairs [begin, size) takes the rows that all of them see together, then each pair its own rest.
HWY_NOINLINE void SumBlock(const Dims& dims, const Group& group, int64_t begin, int64_t block_index,
                           const float* block, bool first, const float* f, Running* span,
                           const Scratch& scratch) {
  const float* x[kGroup];
  float* y[kGroup];
  for (int64_t i = begin; i < group.size; ++i) {
    x[i] = scratch.e[i];
    y[i] = span[i].acc;
  }
  const int64_t shared = Visible(group, begin, block_index);
  const ProductParams together = {.x = x + begin,
                                  .w = block,
                                  .w_stride = dims.width,
                                  .scale = f + begin,
                                  .y = y + begin,
                                  .rows = group.size - begin,
                                  .k = shared,
                                  .cols = dims.rank};
  if (first) {
    Product<ChainStart::kZero>(together);
  } else {
    Product<ChainStart::kScale>(together);
  }
  for (int64_t i = begin; i < group.size; ++i) {
    const int64_t rest = Visible(group, i, block_index) - shared;
    if (rest == 0) continue;
    const float* own = x[i] + shared;
    Product<ChainStart::kKeep>({.x = &own,
                                .w = block + shared * dims.width,
                                .w_stride = dims.width,
                                .scale = nullptr,
                                .y = y + i,
                                .rows = 1,
                                .k = rest,
                                .cols = dims.rank});
  }
}

HWY_INLINE void Merge(const Running& span, int64_t rank, Running& total) {
  const float m = span.m > total.m ? span.m : total.m;
  const float f = kernels::Exp(total.m - m), g = kernels::Exp(span.m - m);
  total.l = std::fma(total.l, f, span.l * g);
  total.m = m;
  const VF fv = hn::Set(DF(), f), gv = hn::Set(DF(), g);
  ForVectors(0, rank, [&](int64_t r, int64_t count) HWY_ATTR {
    const VF added = hn::Mul(LoadUpTo(span.acc + r, count), gv);
    StoreUpTo(hn::MulAdd(LoadUpTo(total.acc + r, count), fv, added), total.acc + r, count);
  });
}

// First pair of the group that sees any row of the block.
HWY_INLINE int64_t FirstActive(const Group& group, int64_t block) {
  int64_t pair = 0;
  while (pair < group.size && group.positions[pair] <= block * kBlock) ++pair;
  return pair;
}

HWY_NOINLINE void AttendSpan(const MlaAttendParams& p, const Dims& dims, int64_t block_begin,
                             int64_t block_end, Group& group, Scratch& scratch) {
  Running span[kGroup];
  for (int64_t i = 0; i < group.size; ++i) {
    span[i] = {.m = 0.0f, .l = 0.0f, .acc = block_begin == 0 ? group.total[i].acc : scratch.acc[i]};
  }
  for (int64_t b = block_begin; b < block_end; ++b) {
    const bool first = b == block_begin;
    const int64_t active = FirstActive(group, b);
    ScoreBlock(dims, group, active, p.blocks[b], Visible(group, group.size - 1, b), scratch);
    float f[kGroup];
    for (int64_t i = active; i < group.size; ++i) {
      f[i] = SoftmaxBlock(scratch.e[i], Visible(group, i, b), first, span[i]);
    }
    SumBlock(dims, group, active, b, p.blocks[b], first, f, span, scratch);
  }
  for (int64_t i = FirstActive(group, block_begin); i < group.size; ++i) {
    if (block_begin == 0) {
      group.total[i] = span[i];
    } else {
      Merge(span[i], dims.rank, group.total[i]);
    }
  }
}

HWY_INLINE void AttendGroup(const MlaAttendParams& p, const Dims& dims, Group& group,
                            Scratch& scratch) {
  const int64_t block_count = (group.positions[group.size - 1] + kBlock - 1) / kBlock;
  for (int64_t b = 0; b < block_count; b += kSpanBlocks) {
    AttendSpan(p, dims, b, HWY_MIN(b + kSpanBlocks, block_count), group, scratch);
  }
  for (int64_t i = 0; i < group.size; ++i) {
    float* acc = group.total[i].acc;
    const VF l = hn::Set(DF(), group.total[i].l);
    ForVectors(0, dims.rank, [&](int64_t r, int64_t count) HWY_ATTR {
      StoreUpTo(hn::Div(LoadUpTo(acc + r, count), l), acc + r, count);
    });
  }
}

void MlaAttendCpu(const MlaAttendParams& p) {
  HWY_ASSERT(p.rank <= kMaxRank);
  const Dims dims = {.rank = p.rank, .rope = p.rope, .width = p.rank + p.rope, .scale = p.scale};
  Scratch scratch;
  for (int64_t begin = p.pair_begin; begin < p.pair_end; begin += kGroup) {
    Group group;
    group.size = HWY_MIN(kGroup, p.pair_end - begin);
    for (int64_t i = 0; i < group.size; ++i) {
      const int64_t pair = begin + i, token = pair / p.heads, head = pair % p.heads;
      group.latent[i] = p.q_latent + pair * p.rank;
      group.rope[i] = p.q_rope + token * p.q_rope_token_stride + head * p.q_rope_head_stride;
      group.positions[i] = p.start + token + 1;
      group.total[i] = {.m = 0.0f, .l = 0.0f, .acc = p.o + pair * p.rank};
    }
    AttendGroup(p, dims, group, scratch);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltamesh::kernels {

HWY_EXPORT(MlaAttendCpu);

void MlaAttend(const MlaAttendParams& p) { HWY_DYNAMIC_DISPATCH(MlaAttendCpu)(p); }

}  // namespace deltamesh::kernels
#endif  // HWY_ONCE

// Pairs pass in groups over each block, so a latent that was loaded serves many queries: first all scores
// of the block, then its softmax, then the weighted sum of its rows.
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/base/simd_targets.h"
#include "kernels/mla/mla.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/mla/mla_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/base/lanes-inl.h"
#include "kernels/base/math-inl.h"
#include "kernels/mla/tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltamesh::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

static_assert(kMlaGroup % kN == 0);

// Running softmax of a group's pairs; the weighted sums of latents are rows of `acc`.
struct Running {
  alignas(64) float m[kMlaGroup];
  alignas(64) float l[kMlaGroup];
  float* acc;
  int64_t acc_stride;
};

// Consecutive pairs; positions never decrease from one to the next.
struct Group {
  int64_t size, panels;
  int64_t positions[kMlaGroup];             // that the pair may see
  alignas(64) float visible[kMlaGroup];     // the same within the block at hand, 0 .. 64
  alignas(64) float f[kMlaGroup];           // what the block leaves of earlier sums
  alignas(64) float e[kBlock * kMlaGroup];  // scores, then their exponentials, [64][panels * kN]
  alignas(64) float q[kMlaGroup * (kMaxRank + kMaxRope)];  // [panels][width][kN]
  Running span, total;
  // Rows of `span` where they may not go to the output. The odd stride keeps them out of one another's way
  // in the first-level cache.
  alignas(64) float acc[kMlaGroup * (kMaxRank + kLanes)];
  int64_t stride() const { return panels * kN; }
};

// Lane i of panel takes source[i][k], k < count; lanes beyond `lanes` are zero.
HWY_INLINE void PackLanes(const float* const* source, int64_t lanes, int64_t count, float* panel) {
  for (int64_t k = 0; k < count; ++k, panel += kN) {
    for (int64_t i = 0; i < lanes; ++i) panel[i] = source[i][k];
    for (int64_t i = lanes; i < kN; ++i) panel[i] = 0.0f;
  }
}

HWY_NOINLINE void PackQueries(const MlaAttendParams& p, int64_t begin, Group& group) {
  for (int64_t i = 0; i < group.size; i += kN) {
    const float *latent[kN], *rope[kN];
    const int64_t lanes = HWY_MIN(kN, group.size - i);
    for (int64_t j = 0; j < lanes; ++j) {
      const int64_t pair = begin + i + j, token = pair / p.heads, head = pair % p.heads;
      latent[j] = p.q_latent + pair * p.rank;
      rope[j] = p.q_rope + token * p.q_rope_token_stride + head * p.q_rope_head_stride;
      group.positions[i + j] = p.start + token + 1;
    }
    float* panel = group.q + i * (p.rank + p.rope);
    PackLanes(latent, lanes, p.rank, panel);
    PackLanes(rope, lanes, p.rope, panel + p.rank * kN);
  }
}

HWY_INLINE int64_t Visible(const Group& group, int64_t pair, int64_t block) {
  return HWY_MAX(HWY_MIN(group.positions[pair] - block * kBlock, kBlock), 0);
}

// First pair of the group that sees any row of the block.
HWY_INLINE int64_t FirstActive(const Group& group, int64_t block) {
  int64_t pair = 0;
  while (pair < group.size && group.positions[pair] <= block * kBlock) ++pair;
  return pair;
}

// One panel: scales the scores, absent ones become -inf; returns the largest of each pair.
template <bool kAll>
HWY_INLINE VF ScaleScores(float* e, int64_t stride, float scale, VF visible) {
  const DF d;
  const VF by = hn::Set(d, scale), none = hn::Set(d, -std::numeric_limits<float>::infinity());
  VF most = none;
  for (int64_t s = 0; s < kBlock; ++s) {
    VF x = hn::Mul(hn::Load(d, e + s * stride), by);
    if (!kAll) {
      x = hn::IfThenElse(hn::Lt(hn::Set(d, static_cast<float>(s)), visible), x, none);
    }
    hn::Store(x, d, e + s * stride);
    most = hn::Max(most, x);
  }
  return most;
}

// One panel: scores become exponentials; returns their sums.
HWY_INLINE VF Exponentials(float* e, int64_t stride, VF m) {
  const DF d;
  VF lane[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) lane[j] = hn::Zero(d);
  for (int64_t s0 = 0; s0 < kBlock; s0 += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) {
      float* at = e + (s0 + j) * stride;
      const VF x = Exp(d, hn::Sub(hn::Load(d, at), m));
      hn::Store(x, d, at);
      lane[j] = hn::Add(lane[j], x);
    }
  }
  for (int64_t half = kLanes / 2; half >= 1; half /= 2) {
    for (int64_t j = 0; j < half; ++j) lane[j] = hn::Add(lane[j], lane[j + half]);
  }
  return lane[0];
}

// Softmax of the block's scores for the pairs that see any of it; the others keep their values.
HWY_NOINLINE void SoftmaxBlock(float scale, int64_t block, bool first, Group& group) {
  const DF d;
  const int64_t begin = FirstActive(group, block);
  for (int64_t i = 0; i < group.stride(); ++i) {
    group.visible[i] = i < group.size ? static_cast<float>(Visible(group, i, block)) : kBlock;
  }
  const bool all = begin == 0 && Visible(group, 0, block) == kBlock;
  for (int64_t i = begin / kN * kN; i < group.stride(); i += kN) {
    const VF visible = hn::Load(d, group.visible + i);
    float* e = group.e + i;
    VF m = all ? ScaleScores<true>(e, group.stride(), scale, visible)
               : ScaleScores<false>(e, group.stride(), scale, visible);
    const VF old_m = hn::Load(d, group.span.m + i), old_l = hn::Load(d, group.span.l + i);
    if (!first) m = hn::Max(m, old_m);
    const VF sum = Exponentials(e, group.stride(), m);
    VF l = sum;
    if (!first) {
      const VF f = Exp(d, hn::Sub(old_m, m));
      hn::Store(f, d, group.f + i);
      l = hn::MulAdd(old_l, f, sum);
    }
    const auto sees = hn::Gt(visible, hn::Zero(d));
    hn::Store(hn::IfThenElse(sees, m, old_m), d, group.span.m + i);
    hn::Store(hn::IfThenElse(sees, l, old_l), d, group.span.l + i);
  }
}

// acc of the pairs takes the rows that all of them see together, then those of each token its own rest.
HWY_NOINLINE void SumBlock(const MlaAttendParams& p, int64_t block, bool first, Group& group) {
  const int64_t begin = FirstActive(group, block), shared = Visible(group, begin, block);
  SumParams sum = {.e = group.e + begin,
                   .e_stride = group.stride(),
                   .rows = p.blocks[block],
                   .width = p.rank + p.rope,
                   .rank = p.rank,
                   .start = first ? SumStart::kZero : SumStart::kScale,
                   .f = group.f + begin,
                   .acc = group.span.acc + begin * group.span.acc_stride,
                   .acc_stride = group.span.acc_stride,
                   .pairs = group.size - begin,
                   .s_begin = 0,
                   .s_end = shared};
  SumRows(sum);
  sum.start = SumStart::kKeep;
  sum.s_begin = shared;
  for (int64_t i = begin; i < group.size;) {
    int64_t end = i + 1;
    while (end < group.size && group.positions[end] == group.positions[i]) ++end;
    sum.s_end = Visible(group, i, block);
    sum.pairs = end - i;
    if (sum.s_end > shared) SumRows(sum);
    sum.e += end - i;
    sum.acc += (end - i) * sum.acc_stride;
    i = end;
  }
}

// Leaves the span's own softmax in group.span; pairs that see nothing of it get l = 0.
HWY_NOINLINE void AttendSpan(const MlaAttendParams& p, int64_t span, Group& group) {
  const int64_t last = group.positions[group.size - 1];
  const int64_t blocks = (last + kBlock - 1) / kBlock;
  const int64_t begin = span * kSpanBlocks, end = HWY_MIN(begin + kSpanBlocks, blocks);
  std::memset(group.span.l, 0, sizeof(group.span.l));
  std::memset(group.span.m, 0, sizeof(group.span.m));
  for (int64_t b = begin; b < end; ++b) {
    const ScoreParams score = {.q = group.q,
                               .rows = p.blocks[b],
                               .next = b + 1 < blocks ? p.blocks[b + 1] : nullptr,
                               .width = p.rank + p.rope,
                               .e = group.e,
                               .e_stride = group.stride()};
    ScoreBlock(score, FirstActive(group, b) / kN, group.panels, Visible(group, group.size - 1, b));
    SoftmaxBlock(p.scale, b, b == begin, group);
    SumBlock(p, b, b == begin, group);
  }
}

// One pair: (m, l, acc) takes a later span.
HWY_INLINE void Merge(float ms, float ls, const float* accs, int64_t rank, float& m, float& l,
                      float* acc) {
  const float both = ms > m ? ms : m;
  const float f = kernels::Exp(m - both), g = kernels::Exp(ms - both);
  l = std::fma(l, f, ls * g);
  m = both;
  const VF fv = hn::Set(DF(), f), gv = hn::Set(DF(), g);
  ForVectors(0, rank, [&](int64_t r, int64_t count) HWY_ATTR {
    const VF added = hn::Mul(LoadUpTo(accs + r, count), gv);
    StoreUpTo(hn::MulAdd(LoadUpTo(acc + r, count), fv, added), acc + r, count);
  });
}

HWY_INLINE void DivideBy(float l, int64_t rank, float* acc) {
  const VF by = hn::Set(DF(), l);
  ForVectors(0, rank, [&](int64_t r, int64_t count) HWY_ATTR {
    StoreUpTo(hn::Div(LoadUpTo(acc + r, count), by), acc + r, count);
  });
}

void SetSpanRows(float* acc, int64_t stride, Group& group) {
  group.span.acc = acc;
  group.span.acc_stride = stride;
}

HWY_INLINE void AttendGroup(const MlaAttendParams& p, int64_t begin, Group& group) {
  const int64_t spans =
      (group.positions[group.size - 1] + kBlock * kSpanBlocks - 1) / (kBlock * kSpanBlocks);
  float* o = p.o + begin * p.rank;
  SetSpanRows(o, p.rank, group);
  AttendSpan(p, 0, group);
  std::memcpy(group.total.m, group.span.m, sizeof(group.total.m));
  std::memcpy(group.total.l, group.span.l, sizeof(group.total.l));
  SetSpanRows(group.acc, (p.rank + kLanes - 1) / kLanes * kLanes + kLanes, group);
  for (int64_t span = 1; span < spans; ++span) {
    AttendSpan(p, span, group);
    for (int64_t i = FirstActive(group, span * kSpanBlocks); i < group.size; ++i) {
      Merge(group.span.m[i], group.span.l[i], group.span.acc + i * group.span.acc_stride, p.rank,
            group.total.m[i], group.total.l[i], o + i * p.rank);
    }
  }
  for (int64_t i = 0; i < group.size; ++i) DivideBy(group.total.l[i], p.rank, o + i * p.rank);
}

// Calls body(first pair, group) with packed queries for the groups of [pair_begin, pair_end).
template <class Body>
HWY_INLINE void ForGroups(const MlaAttendParams& p, const Body& body) {
  HWY_ASSERT(p.rank <= kMaxRank && p.rope <= kMaxRope);
  Group group;
  for (int64_t begin = p.pair_begin; begin < p.pair_end; begin += kMlaGroup) {
    group.size = HWY_MIN(kMlaGroup, p.pair_end - begin);
    group.panels = (group.size + kN - 1) / kN;
    PackQueries(p, begin, group);
    body(begin, group);
  }
}

void MlaAttendCpu(const MlaAttendParams& p) {
  ForGroups(p, [&](int64_t begin, Group& group) HWY_ATTR { AttendGroup(p, begin, group); });
}

void MlaAttendSpansCpu(const MlaAttendParams& p, int64_t span_begin, int64_t span_end,
                       const MlaPartials& out) {
  const int64_t pairs = p.tokens * p.heads;
  ForGroups(p, [&](int64_t begin, Group& group) HWY_ATTR {
    const size_t bytes = static_cast<size_t>(group.size) * sizeof(float);
    for (int64_t span = span_begin; span < span_end; ++span) {
      const int64_t at = (span - out.first_span) * pairs + begin;
      SetSpanRows(out.acc + at * p.rank, p.rank, group);
      AttendSpan(p, span, group);
      std::memcpy(out.m + at, group.span.m, bytes);
      std::memcpy(out.l + at, group.span.l, bytes);
    }
  });
}

void MlaMergeSpansCpu(const MlaMergeParams& p) {
  for (int64_t pair = p.pair_begin; pair < p.pair_end; ++pair) {
    float *o = p.o + pair * p.rank, &m = p.m[pair], &l = p.l[pair];
    for (int64_t span = 0; span < p.spans; ++span) {
      const int64_t at = span * p.pairs + pair;
      const float ms = p.partials.m[at], ls = p.partials.l[at], *acc = p.partials.acc + at * p.rank;
      if (p.partials.first_span + span == 0) {
        m = ms;
        l = ls;
        std::memcpy(o, acc, static_cast<size_t>(p.rank) * sizeof(float));
      } else if (ls != 0.0f) {
        Merge(ms, ls, acc, p.rank, m, l, o);
      }
    }
    if (p.last) DivideBy(l, p.rank, o);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace deltamesh::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deltamesh::kernels {

HWY_EXPORT(MlaAttendCpu);
HWY_EXPORT(MlaAttendSpansCpu);
HWY_EXPORT(MlaMergeSpansCpu);

void MlaAttend(const MlaAttendParams& p) { HWY_DYNAMIC_DISPATCH(MlaAttendCpu)(p); }
void MlaAttendSpans(const MlaAttendParams& p, int64_t span_begin, int64_t span_end,
                    const MlaPartials& out) {
  HWY_DYNAMIC_DISPATCH(MlaAttendSpansCpu)(p, span_begin, span_end, out);
}
void MlaMergeSpans(const MlaMergeParams& p) { HWY_DYNAMIC_DISPATCH(MlaMergeSpansCpu)(p); }

}  // namespace deltamesh::kernels
#endif  // HWY_ONCE

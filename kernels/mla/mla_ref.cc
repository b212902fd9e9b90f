#include <cmath>

#include "kernels/base/math.h"
#include "kernels/base/types.h"
#include "kernels/mla/mla.h"

namespace deltamesh::kernels {
namespace {

// Running softmax: largest score, sum of exponentials, weighted sum of latents (in `acc`).
struct Running {
  float m = 0.0f, l = 0.0f;
  float* acc = nullptr;
};

struct Query {
  const float *latent, *rope;
  int64_t rank, rope_dim;
  float scale;
};

float Score(const Query& q, const float* row) {
  float acc = 0.0f;
  for (int64_t i = 0; i < q.rank; ++i) acc = std::fma(q.latent[i], row[i], acc);
  for (int64_t i = 0; i < q.rope_dim; ++i) acc = std::fma(q.rope[i], row[q.rank + i], acc);
  return acc * q.scale;
}

// Takes one block of `count` positions into the running values of its span.
void TakeBlock(const Query& q, const float* block, int64_t count, bool first, Running& span) {
  const int64_t width = q.rank + q.rope_dim;
  float e[kBlock];
  float m = 0.0f;
  for (int64_t s = 0; s < count; ++s) {
    e[s] = Score(q, block + s * width);
    if (s == 0 || e[s] > m) m = e[s];
  }
  if (!first && span.m > m) m = span.m;
  float lanes[kLanes] = {};
  for (int64_t s = 0; s < count; ++s) {
    e[s] = Exp(e[s] - m);
    lanes[s % kLanes] += e[s];
  }
  const float sum = ReduceLanes(lanes);
  const float f = first ? 0.0f : Exp(span.m - m);
  span.l = first ? sum : std::fma(span.l, f, sum);
  span.m = m;
  for (int64_t r = 0; r < q.rank; ++r) {
    float acc = first ? 0.0f : span.acc[r] * f;
    for (int64_t s = 0; s < count; ++s) acc = std::fma(e[s], block[s * width + r], acc);
    span.acc[r] = acc;
  }
}

void Merge(const Running& span, int64_t rank, Running& total) {
  const float m = span.m > total.m ? span.m : total.m;
  const float f = Exp(total.m - m), g = Exp(span.m - m);
  total.l = std::fma(total.l, f, span.l * g);
  total.m = m;
  for (int64_t r = 0; r < rank; ++r) {
    total.acc[r] = std::fma(total.acc[r], f, span.acc[r] * g);
  }
}

void Attend(const Query& q, const float* const* blocks, int64_t positions, float* o) {
  float scratch[kMaxRank];
  Running total = {.acc = o};
  const int64_t block_count = (positions + kBlock - 1) / kBlock;
  for (int64_t begin = 0; begin < block_count; begin += kSpanBlocks) {
    Running span = {.acc = begin == 0 ? o : scratch};
    for (int64_t b = begin; b < block_count && b < begin + kSpanBlocks; ++b) {
      const int64_t left = positions - b * kBlock;
      TakeBlock(q, blocks[b], left < kBlock ? left : kBlock, b == begin, span);
    }
    if (begin == 0) {
      total = span;
    } else {
      Merge(span, q.rank, total);
    }
  }
  for (int64_t r = 0; r < q.rank; ++r) o[r] = total.acc[r] / total.l;
}

}  // namespace

void MlaAttendRef(const MlaAttendParams& p) {
  for (int64_t pair = p.pair_begin; pair < p.pair_end; ++pair) {
    const int64_t token = pair / p.heads, head = pair % p.heads;
    const Query q = {.latent = p.q_latent + pair * p.rank,
                     .rope = p.q_rope + token * p.q_rope_token_stride + head * p.q_rope_head_stride,
                     .rank = p.rank,
                     .rope_dim = p.rope,
                     .scale = p.scale};
    Attend(q, p.blocks, p.start + token + 1, p.o + pair * p.rank);
  }
}

}  // namespace deltamesh::kernels

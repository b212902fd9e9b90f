#include "kernels/mla/mla.h"

#include <algorithm>

#include "tests/parity/common.h"

namespace deltamesh::kernels {
namespace {

struct Case {
  int64_t start, tokens, heads, rank, rope;
  float scale;
  std::vector<float> q_latent = {}, q_rope = {};
  std::vector<std::vector<float>> storage = {};
  std::vector<const float*> blocks = {};
  int64_t rope_stride() const { return rope + 2; }
};

Case MakeCase(int64_t start, int64_t tokens, int64_t heads, int64_t rank, int64_t rope,
              Random& random) {
  Case c = {.start = start,
            .tokens = tokens,
            .heads = heads,
            .rank = rank,
            .rope = rope,
            .scale = 1.7f / std::sqrt(static_cast<float>(rank + rope))};
  c.q_latent = random.Normal(tokens * heads * rank);
  c.q_rope = random.Normal(tokens * heads * c.rope_stride() + 1);
  const int64_t positions = start + tokens, width = rank + rope;
  for (int64_t b = 0; b * kBlock < positions; ++b) {
    std::vector<float> block = random.Normal(kBlock * width + 1);
    // Rows that do not exist yet hold anything at all.
    const int64_t rows = std::min(kBlock, positions - b * kBlock);
    std::fill(block.begin() + 1 + rows * width, block.end(), std::nanf(""));
    c.storage.push_back(std::move(block));
  }
  for (const std::vector<float>& block : c.storage) c.blocks.push_back(block.data() + 1);
  return c;
}

using Kernel = void (*)(const MlaAttendParams&);

MlaAttendParams Params(const Case& c, int64_t begin, int64_t end, float* o) {
  return {.q_latent = c.q_latent.data(),
          .q_rope = c.q_rope.data() + 1,
          .q_rope_head_stride = c.rope_stride(),
          .q_rope_token_stride = c.heads * c.rope_stride(),
          .blocks = c.blocks.data(),
          .start = c.start,
          .scale = c.scale,
          .o = o,
          .tokens = c.tokens,
          .heads = c.heads,
          .rank = c.rank,
          .rope = c.rope,
          .pair_begin = begin,
          .pair_end = end};
}

void Attend(Kernel kernel, const Case& c, int64_t begin, int64_t end, std::vector<float>& o) {
  kernel(Params(c, begin, end, o.data()));
}

std::vector<float> RunAll(Kernel kernel, const Case& c) {
  std::vector<float> o(c.q_latent.size(), 77.0f);
  Attend(kernel, c, 0, c.tokens * c.heads, o);
  return o;
}

TEST(MlaAttendParity, EqualsReferenceOverOddShapes) {
  Random random(21);
  const std::vector<int64_t> dims = {1, 3, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 70};
  const std::vector<int64_t> starts = {0,   1,   15,  47,  63,  64,  65,  127,
                                       200, 511, 512, 513, 575, 700, 1100};
  const std::vector<int64_t> counts = {0, 1, 2, 3, 5, 9, 17, 33};
  for (int64_t start : starts) {
    for (int repeat = 0; repeat < 6; ++repeat) {
      const auto pick = [&](const std::vector<int64_t>& from) {
        return from[static_cast<size_t>(random.Int(0, static_cast<int64_t>(from.size()) - 1))];
      };
      const Case c = MakeCase(start, pick(counts), random.Int(1, 7), pick(dims),
                              repeat == 0 ? 0 : pick(dims), random);
      SCOPED_TRACE(::testing::Message()
                   << "start " << c.start << " tokens " << c.tokens << " heads " << c.heads
                   << " rank " << c.rank << " rope " << c.rope);
      const std::vector<float> want = RunAll(MlaAttendRef, c);
      ForEachTarget([&] { EXPECT_TRUE(Identical(RunAll(MlaAttend, c), want)); });
    }
  }
}

TEST(MlaAttendParity, RealWidthAndManyHeads) {
  Random random(22);
  for (int64_t heads : {1, 3, 5, 16, 32}) {
    const Case c = MakeCase(530, 2, heads, 512, 64, random);
    const std::vector<float> want = RunAll(MlaAttendRef, c);
    ForEachTarget([&] { EXPECT_TRUE(Identical(RunAll(MlaAttend, c), want)); });
  }
}

TEST(MlaAttendSplits, NoSplitOfPairsOrTokensShows) {
  Random random(23);
  const Case c = MakeCase(500, 40, 3, 32, 16, random);
  ForEachTarget([&] {
    const std::vector<float> whole = RunAll(MlaAttend, c);
    std::vector<float> parts(whole.size(), 77.0f);
    for (int64_t pair = 0; pair < c.tokens * c.heads;) {
      const int64_t end = std::min(pair + random.Int(1, 25), c.tokens * c.heads);
      Attend(MlaAttend, c, pair, end, parts);
      pair = end;
    }
    EXPECT_TRUE(Identical(parts, whole));
    // Token by token, as decode calls it.
    std::vector<float> steps(whole.size(), 77.0f);
    for (int64_t t = 0; t < c.tokens; ++t) {
      Case one = c;
      one.start = c.start + t;
      one.tokens = 1;
      one.q_latent.assign(c.q_latent.begin() + t * c.heads * c.rank,
                          c.q_latent.begin() + (t + 1) * c.heads * c.rank);
      one.q_rope.assign(c.q_rope.begin() + t * c.heads * c.rope_stride(), c.q_rope.end());
      const std::vector<float> o = RunAll(MlaAttend, one);
      std::copy(o.begin(), o.end(), steps.begin() + t * c.heads * c.rank);
    }
    EXPECT_TRUE(Identical(steps, whole));
  });
}

// Spans on their own, in waves of `wave`, merged: what decode does.
std::vector<float> RunSpans(const Case& c, int64_t wave, Random& random) {
  const int64_t pairs = c.tokens * c.heads;
  const int64_t spans = (c.start + c.tokens + kBlock * kSpanBlocks - 1) / (kBlock * kSpanBlocks);
  const auto floats = [](int64_t n) { return std::vector<float>(static_cast<size_t>(n), 55.0f); };
  std::vector<float> o = floats(pairs * c.rank), m = floats(pairs), l = floats(pairs);
  for (int64_t from = 0; from < spans; from += wave) {
    const int64_t count = std::min(wave, spans - from);
    std::vector<float> span_m = floats(count * pairs), span_l = floats(count * pairs);
    std::vector<float> acc = floats(count * pairs * c.rank);
    const MlaPartials partials = {span_m.data(), span_l.data(), acc.data(), from};
    for (int64_t span = from + count; span-- > from;) {
      for (int64_t pair = 0; pair < pairs;) {
        const int64_t end = std::min(pair + random.Int(1, 60), pairs);
        MlaAttendSpans(Params(c, pair, end, nullptr), span, span + 1, partials);
        pair = end;
      }
    }
    for (int64_t pair = 0; pair < pairs;) {
      const int64_t end = std::min(pair + random.Int(1, 60), pairs);
      MlaMergeSpans({.partials = partials,
                     .spans = count,
                     .pairs = pairs,
                     .rank = c.rank,
                     .m = m.data(),
                     .l = l.data(),
                     .o = o.data(),
                     .last = from + count == spans,
                     .pair_begin = pair,
                     .pair_end = end});
      pair = end;
    }
  }
  return o;
}

TEST(MlaAttendSplits, SpansOnTheirOwnGiveTheSameBits) {
  Random random(26);
  struct Shape {
    int64_t start, tokens, heads, rank, rope;
  };
  // Chunks that begin in one span and end in the next see spans that some of their pairs do not.
  for (const Shape& s :
       {Shape{0, 1, 3, 17, 5}, Shape{511, 1, 16, 64, 16}, Shape{500, 40, 3, 33, 0},
        Shape{1020, 9, 5, 40, 7}, Shape{2100, 1, 1, 48, 16}, Shape{1500, 70, 1, 16, 3}}) {
    const Case c = MakeCase(s.start, s.tokens, s.heads, s.rank, s.rope, random);
    SCOPED_TRACE(::testing::Message() << "start " << s.start << " tokens " << s.tokens);
    const std::vector<float> want = RunAll(MlaAttendRef, c);
    ForEachTarget([&] {
      for (int64_t wave : {1, 2, 100}) {
        EXPECT_TRUE(Identical(RunSpans(c, wave, random), want));
      }
    });
  }
}

// Softmax attention in float64, all positions at once.
//
// A score is a chain of n = rank + rope multiply-adds and the scale: its
// error is at most gamma(n + 1) * scale * sum |q c| =: ds. Each exponential argument is a
// difference of two scores rounded once more, so e is off by a factor within exp(2 ds + u
// |difference|) and 2 u for exp itself; the factors of merging blocks and spans multiply to the
// same exponentials, 4 u for each of the `merges`. The weighted sum adds gamma(64 + merges) and
// the division 1 u. All of it relative to sum p |c|, where the weights' relative error counts
// twice (numerator and denominator).
TEST(MlaAttendAccuracy, WithinTheBoundOfSoftmaxAttention) {
  Random random(24);
  for (int64_t start : {0, 70, 600, 1500}) {
    const Case c = MakeCase(start, 3, 2, 40, 9, random);
    const std::vector<float> o = RunAll(MlaAttendRef, c);
    const int64_t width = c.rank + c.rope;
    for (int64_t pair = 0; pair < c.tokens * c.heads; ++pair) {
      const int64_t positions = start + pair / c.heads + 1;
      const auto row = [&](int64_t s) {
        return c.blocks[static_cast<size_t>(s / kBlock)] + s % kBlock * width;
      };
      std::vector<double> score(static_cast<size_t>(positions));
      double most = -1e300, least = 1e300, size = 0;
      for (int64_t s = 0; s < positions; ++s) {
        double sum = 0, absolute = 0;
        for (int64_t i = 0; i < width; ++i) {
          const double q =
              i < c.rank ? c.q_latent[static_cast<size_t>(pair * c.rank + i)]
                         : c.q_rope[static_cast<size_t>(1 + pair * c.rope_stride() + i - c.rank)];
          sum += q * row(s)[i];
          absolute += std::fabs(q * row(s)[i]);
        }
        score[static_cast<size_t>(s)] = sum * c.scale;
        most = std::max(most, sum * c.scale);
        least = std::min(least, sum * c.scale);
        size = std::max(size, absolute * c.scale);
      }
      double total = 0;
      for (double& s : score) total += s = std::exp(s - most);
      const double merges = 2 + static_cast<double>(positions) / kBlock;
      const double ds = Gamma(static_cast<double>(width) + 1) * size;
      const double weight_error = 2 * ds + (most - least + 2 + 4 * merges) * kUnit;
      for (int64_t r = 0; r < c.rank; ++r) {
        double sum = 0, absolute = 0;
        for (int64_t s = 0; s < positions; ++s) {
          const double p = score[static_cast<size_t>(s)] / total;
          sum += p * row(s)[r];
          absolute += p * std::fabs(row(s)[r]);
        }
        const double bound = (2 * weight_error + 2 * Gamma(64 + 3 * merges) + 2 * kUnit) * absolute;
        ASSERT_NEAR(o[static_cast<size_t>(pair * c.rank + r)], sum, bound);
      }
    }
  }
}

// A mask off by one must show.
TEST(MlaAttendCanary, OneMorePositionIsDifferent) {
  Random random(25);
  Case c = MakeCase(100, 2, 1, 16, 0, random);
  const std::vector<float> right = RunAll(MlaAttend, c);
  Case shifted = c;
  shifted.start = 101;
  shifted.tokens = 1;
  const std::vector<float> wrong = [&] {
    std::vector<float> o(16);
    Attend(MlaAttend, shifted, 0, 1, o);
    return o;
  }();
  EXPECT_FALSE(Identical(wrong, {right.begin(), right.begin() + 16}));
}

}  // namespace
}  // namespace deltamesh::kernels

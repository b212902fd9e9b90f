#include "kernels/kda/kda.h"

#include <algorithm>

#include "tests/parity/common.h"

namespace deltamesh::kernels {
namespace {

// Inputs of a run of tokens of one layer, and what a caller keeps between runs.
struct Layer {
  int64_t heads, dim, tokens, stride;
  std::vector<float> q = {}, k = {}, v = {}, a = {}, beta = {};
};

struct State {
  std::vector<float> s, decay, khat, u;

  State(int64_t heads, int64_t dim)
      : s(static_cast<size_t>(heads * dim * dim), 0.0f),
        decay(static_cast<size_t>(heads * dim), 1.0f),
        khat(static_cast<size_t>(heads * dim * kTile), 0.0f),
        u(static_cast<size_t>(heads * kTile * dim), 0.0f) {}
  KdaState View() { return {s.data(), decay.data(), khat.data(), u.data()}; }
};

::testing::AssertionResult Identical(const State& a, const State& b) {
  const std::pair<const std::vector<float>*, const std::vector<float>*> parts[] = {
      {&a.s, &b.s}, {&a.decay, &b.decay}, {&a.khat, &b.khat}, {&a.u, &b.u}};
  const char* names[] = {"s", "decay", "khat", "u"};
  for (int i = 0; i < 4; ++i) {
    ::testing::AssertionResult same = kernels::Identical(*parts[i].first, *parts[i].second);
    if (!same) return same << " in " << names[i];
  }
  return ::testing::AssertionSuccess();
}

Layer MakeLayer(int64_t heads, int64_t dim, int64_t tokens, Random& random) {
  Layer layer = {.heads = heads, .dim = dim, .tokens = tokens, .stride = heads * dim + 3};
  layer.q = random.Normal(tokens * layer.stride + 1);
  layer.k = random.Normal(tokens * layer.stride + 1);
  layer.v = random.Normal(tokens * layer.stride + 1);
  layer.a = random.UniformVector(tokens * layer.stride + 1, 0.3f, 1.0f);
  layer.beta = random.UniformVector(tokens * (heads + 1), 0.02f, 0.98f);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      for (auto [x, scale] : {std::pair{&layer.q, 1 / std::sqrt(static_cast<double>(dim))},
                              std::pair{&layer.k, 1.0}}) {
        float* row = x->data() + 1 + t * layer.stride + h * dim;
        double sum = 1e-6;
        for (int64_t d = 0; d < dim; ++d) sum += static_cast<double>(row[d]) * row[d];
        for (int64_t d = 0; d < dim; ++d)
          row[d] = static_cast<float>(row[d] / std::sqrt(sum) * scale);
      }
    }
  }
  return layer;
}

using Kernel = void (*)(const KdaAdvanceParams&);

// Advances tokens [begin, end) of all heads; position `begin` counts from the last tile boundary.
void Advance(Kernel kernel, const Layer& layer, int64_t begin, int64_t end, State& state,
             std::vector<float>& o, int64_t head_begin, int64_t head_end) {
  const int64_t at = 1 + begin * layer.stride;  // 1: nothing may depend on alignment
  kernel({.q = layer.q.data() + at,
          .k = layer.k.data() + at,
          .v = layer.v.data() + at,
          .a = layer.a.data() + at,
          .stride = layer.stride,
          .beta = layer.beta.data() + begin * (layer.heads + 1),
          .beta_stride = layer.heads + 1,
          .state = state.View(),
          .open_rows = begin % kTile,
          .o = o.data() + begin * (layer.stride + 2),
          .o_stride = layer.stride + 2,
          .tokens = end - begin,
          .dim = layer.dim,
          .head_begin = head_begin,
          .head_end = head_end});
}

std::vector<float> Marks(const Layer& layer) {
  return std::vector<float>(static_cast<size_t>(layer.tokens * (layer.stride + 2)), 77.0f);
}

TEST(KdaAdvanceParity, EqualsReferenceOverOddShapes) {
  Random random(11);
  for (int64_t dim :
       {1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 70, 128, 160}) {
    for (int64_t heads : {1, 3}) {
      const int64_t tokens = random.Int(33, 50);
      const Layer layer = MakeLayer(heads, dim, tokens, random);
      // A start inside a tile, then calls of the sizes that decode, prefill and their borders make.
      std::vector<int64_t> cuts = {0, random.Int(0, 17)};
      while (cuts.back() < tokens) {
        cuts.push_back(std::min(tokens, cuts.back() + random.Int(0, 1) * 16 + random.Int(1, 9)));
      }
      SCOPED_TRACE(::testing::Message() << "dim " << dim << " heads " << heads);
      const auto run = [&](Kernel kernel, State& state) {
        std::vector<float> o = Marks(layer);
        for (size_t i = 1; i < cuts.size(); ++i) {
          Advance(kernel, layer, cuts[i - 1], cuts[i], state, o, 0, heads);
        }
        return o;
      };
      State want_state(heads, dim);
      const std::vector<float> want = run(KdaAdvanceRef, want_state);
      ForEachTarget([&] {
        State state(heads, dim);
        EXPECT_TRUE(kernels::Identical(run(KdaAdvance, state), want));
        EXPECT_TRUE(Identical(state, want_state));
      });
    }
  }
}

TEST(KdaAdvanceSplits, NoSplitOfTokensOrHeadsShows) {
  Random random(12);
  const int64_t heads = 3, tokens = 67;
  for (int64_t dim : {19, 64}) {
    const Layer layer = MakeLayer(heads, dim, tokens, random);
    ForEachTarget([&] {
      State whole(heads, dim);
      std::vector<float> want = Marks(layer);
      Advance(KdaAdvance, layer, 0, tokens, whole, want, 0, heads);
      for (int64_t step : {1, 2, 5, 15, 16, 17, 33, 64}) {
        SCOPED_TRACE(::testing::Message() << "dim " << dim << " step " << step);
        State state(heads, dim);
        std::vector<float> o = Marks(layer);
        for (int64_t t = 0; t < tokens; t += step) {
          const int64_t end = std::min(tokens, t + step), cut = random.Int(0, heads);
          Advance(KdaAdvance, layer, t, end, state, o, 0, cut);
          Advance(KdaAdvance, layer, t, end, state, o, cut, heads);
        }
        EXPECT_TRUE(kernels::Identical(o, want));
        EXPECT_TRUE(Identical(state, whole));
      }
    });
  }
}

// What a boundary leaves behind is part of the contract: S moves alone.
TEST(KdaAdvanceState, EmptyTileAtABoundary) {
  Random random(13);
  const Layer layer = MakeLayer(2, 33, 32, random);
  State state(2, 33);
  std::vector<float> o = Marks(layer);
  Advance(KdaAdvance, layer, 0, 32, state, o, 0, 2);
  EXPECT_EQ(state.decay, std::vector<float>(state.decay.size(), 1.0f));
  EXPECT_EQ(state.khat, std::vector<float>(state.khat.size(), 0.0f));
  EXPECT_EQ(state.u, std::vector<float>(state.u.size(), 0.0f));
}

// The recurrence of model.md 6 in float64: decay, erase from the decayed state, write, read.
struct Recurrence {
  int64_t dim;
  std::vector<double> s;
  double state_norm = 0;  // largest Frobenius norm on the way

  explicit Recurrence(int64_t d) : dim(d), s(static_cast<size_t>(d * d), 0.0) {}

  std::vector<double> Step(const float* q, const float* k, const float* v, const float* a,
                           double beta) {
    const auto at = [&](int64_t d, int64_t i) -> double& {
      return s[static_cast<size_t>(d * dim + i)];
    };
    std::vector<double> o(static_cast<size_t>(dim), 0.0);
    double squares = 0;
    for (int64_t i = 0; i < dim; ++i) {
      double r = 0;
      for (int64_t d = 0; d < dim; ++d) r += (at(d, i) *= a[d]) * k[d];
      for (int64_t d = 0; d < dim; ++d) {
        at(d, i) += k[d] * beta * (v[i] - r);
        o[static_cast<size_t>(i)] += at(d, i) * q[d];
        squares += at(d, i) * at(d, i);
      }
    }
    state_norm = std::max(state_norm, std::sqrt(squares));
    return o;
  }
};

struct Deviation {
  double error, bound;
};

// What was measured, with room to spare: the derived bound is safe but a thousand times wider.
double Expected(int64_t dim) { return 2e-6 * static_cast<double>(dim); }

// Error of one head's outputs against the recurrence, and its bound.
//
// One token reads S and the open rows through chains of at most D + 16 terms whose factors are products
// of up to 16 decays and one more: each term passes at most n = D + 16 + 17 roundings, and the sums of
// sizes are at most |S|_F + 16 max|u| with |u| <= |v| + |S|_F (|k| <= 1, |q| <= 1, a <= 1, beta <= 1). A
// token therefore adds at most gamma(n) * M, M = 17 (max|S|_F + max|v|), to u, and as much to o. The exact
// recurrence maps state errors by matrices of norm <= 1, so after T tokens they have added up to at most
// T gamma(n) M; a fold adds gamma(17) M once per tile, which n's slack covers. Hence
// |o error| <= (T + 1) gamma(n) M in norm, so per element. (The true error is far smaller.)
Deviation Compare(const Layer& layer, int64_t head, const std::vector<float>& o) {
  Recurrence oracle(layer.dim);
  double error = 0, v_norm = 0;
  for (int64_t t = 0; t < layer.tokens; ++t) {
    const int64_t at = 1 + t * layer.stride + head * layer.dim;
    const std::vector<double> want = oracle.Step(
        layer.q.data() + at, layer.k.data() + at, layer.v.data() + at, layer.a.data() + at,
        layer.beta[static_cast<size_t>(t * (layer.heads + 1) + head)]);
    double squares = 0;
    for (int64_t i = 0; i < layer.dim; ++i) {
      const double got = o[static_cast<size_t>(t * (layer.stride + 2) + head * layer.dim + i)];
      error = std::max(error, std::fabs(got - want[static_cast<size_t>(i)]));
      squares += std::pow(layer.v[static_cast<size_t>(at + i)], 2);
    }
    v_norm = std::max(v_norm, std::sqrt(squares));
  }
  const double size = 17 * (oracle.state_norm + v_norm);
  const double n = static_cast<double>(layer.dim + 33);
  return {error, static_cast<double>(layer.tokens + 1) * Gamma(n) * size};
}

TEST(KdaAdvanceAccuracy, WithinTheBoundOfTheRecurrence) {
  Random random(14);
  for (int64_t dim : {1, 5, 16, 33, 64, 128}) {
    const Layer layer = MakeLayer(2, dim, 60, random);
    State state(2, dim);
    std::vector<float> o = Marks(layer);
    Advance(KdaAdvance, layer, 0, layer.tokens, state, o, 0, 2);
    for (int64_t head : {0, 1}) {
      const Deviation d = Compare(layer, head, o);
      EXPECT_LE(d.error, d.bound) << "dim " << dim;
      EXPECT_LE(d.error, 2e-6 * static_cast<double>(dim))
          << "much worse than measured, dim " << dim;
    }
  }
}

// A planted bug the comparison must see: one token that does not decay.
TEST(KdaAdvanceCanary, OneForgottenDecayShows) {
  Random random(15);
  const Layer layer = MakeLayer(1, 16, 40, random);
  Layer broken = layer;
  const auto forgotten = broken.a.begin() + 1 + 20 * layer.stride;
  std::fill(forgotten, forgotten + layer.dim, 1.0f);
  State state(1, 16);
  std::vector<float> o = Marks(layer);
  Advance(KdaAdvance, broken, 0, layer.tokens, state, o, 0, 1);
  EXPECT_GT(Compare(layer, 0, o).error, 100 * Expected(layer.dim));
}

TEST(KdaDecay, ParityAndAccuracyOfBothForms) {
  Random random(16);
  for (int64_t dim : {1, 7, 16, 33, 64, 70}) {
    const int64_t heads = 3, tokens = 5, stride = heads * dim + 1;
    for (bool bounded : {false, true}) {
      std::vector<float> z = random.Normal(tokens * stride, 4.0f);
      for (size_t i = 0; i < z.size(); i += 5) z[i] *= 30.0f;
      const std::vector<float> bias = random.Normal(heads * dim);
      const std::vector<float> scale = random.UniformVector(heads, 0.1f, 12.0f);
      const auto run = [&](void (*kernel)(const KdaDecayParams&), bool in_place) {
        std::vector<float> a = in_place ? z : std::vector<float>(z.size(), 77.0f);
        kernel({in_place ? a.data() : z.data(), stride, bias.data(), scale.data(), bounded, -5.0f,
                a.data(), stride, tokens, dim, 1, heads});
        return a;
      };
      const std::vector<float> want = run(KdaDecayRef, false), in_place = run(KdaDecayRef, true);
      ForEachTarget([&] {
        EXPECT_TRUE(kernels::Identical(run(KdaDecay, false), want));
        EXPECT_TRUE(kernels::Identical(run(KdaDecay, true), in_place));
      });
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t c = 0; c < heads * dim; ++c) {
          const size_t i = static_cast<size_t>(t * stride + c);
          if (c < dim) {
            ASSERT_EQ(want[i], 77.0f) << "a head outside the range was written";
            continue;
          }
          const double x = static_cast<double>(z[i]) + bias[static_cast<size_t>(c)];
          const double s = scale[static_cast<size_t>(c / dim)];
          const double softplus = std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x)));
          const double g = bounded ? -5.0 / (1.0 + std::exp(-s * x)) : -s * softplus;
          // The relative error of g, 8 roundings and those that reach it through x (|x| u scaled by the
          // slope of g, at most |s|, and for the sigmoid s |x| in its argument), is an absolute error of
          // the exponent; exp itself adds 2 u.
          const double slope = bounded ? 5.0 * 0.25 * s : s;
          const double exponent = 8 * kUnit * std::fabs(g) + 3 * slope * std::fabs(x) * kUnit;
          ASSERT_NEAR(want[i], std::exp(g), std::exp(g) * (exponent + 3 * kUnit) + 0x1p-148);
        }
      }
    }
  }
}

}  // namespace
}  // namespace deltamesh::kernels

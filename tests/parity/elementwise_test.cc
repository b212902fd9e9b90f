// Norms, short convolution, activations and residuals: parity over odd sizes, and float64 accuracy.
#include <algorithm>

#include "kernels/conv/conv.h"
#include "kernels/moe/moe.h"
#include "kernels/norm/norm.h"
#include "kernels/residual/residual.h"
#include "tests/parity/common.h"

namespace deltamesh::kernels {
namespace {

constexpr int64_t kDims[] = {1,  2,  3,  5,  7,  8,  9,  15, 16, 17, 23,
                             24, 31, 32, 33, 47, 48, 63, 64, 65, 70, 300};
constexpr int64_t kCounts[] = {0, 1, 2, 3, 9, 17};

double Sigmoid64(double x) { return 1 / (1 + std::exp(-x)); }
double Silu64(double x) { return x / (1 + std::exp(-x)); }

// r = 1 / sqrt(sum / dim + eps): the sum of squares passes dim / 16 + 4 roundings and a few more operations
// follow; all terms are positive, so its relative error is gamma(dim / 16 + 8) and the root halves it.
double NormBound(int64_t dim) { return Gamma(static_cast<double>(dim) / 16 + 12); }

TEST(RmsNorm, ParityInPlaceAndAccuracy) {
  Random random(41);
  for (int64_t dim : kDims) {
    for (int64_t tokens : kCounts) {
      const int64_t stride = dim + random.Int(0, 3);
      const std::vector<float> x = random.Normal(tokens * stride + 1, 3.0f),
                               w = random.Normal(dim + 1);
      const auto run = [&](void (*kernel)(const RmsNormParams&), bool in_place) {
        std::vector<float> y = in_place ? x : std::vector<float>(x.size(), 77.0f);
        const float* in = in_place ? y.data() : x.data();
        kernel({in + 1, stride, w.data() + 1, 1e-5f, y.data() + 1, stride, tokens, dim});
        return y;
      };
      const std::vector<float> want = run(RmsNormRef, false), in_place = run(RmsNormRef, true);
      ForEachTarget([&] {
        ASSERT_TRUE(Identical(run(RmsNorm, false), want)) << dim;
        ASSERT_TRUE(Identical(run(RmsNorm, true), in_place)) << dim;
      });
      for (int64_t t = 0; t < tokens; ++t) {
        const float* row = x.data() + 1 + t * stride;
        double sum = 0;
        for (int64_t i = 0; i < dim; ++i) sum += static_cast<double>(row[i]) * row[i];
        const double r = 1 / std::sqrt(sum / static_cast<double>(dim) + 1e-5);
        for (int64_t i = 0; i < dim; ++i) {
          const double y = row[i] * r * w[static_cast<size_t>(1 + i)];
          ASSERT_NEAR(want[static_cast<size_t>(1 + t * stride + i)], y,
                      std::fabs(y) * NormBound(dim));
        }
      }
    }
  }
}

TEST(L2Norm, ParityAndAccuracy) {
  Random random(42);
  for (int64_t dim : kDims) {
    for (int64_t rows : kCounts) {
      const int64_t stride = dim + random.Int(0, 3);
      std::vector<float> x = random.Normal(rows * stride + 1, 0.01f);
      if (rows > 2) std::fill_n(x.begin() + 1 + stride, dim, 0.0f);
      const auto run = [&](void (*kernel)(const L2NormParams&)) {
        std::vector<float> y = x;
        kernel({y.data() + 1, stride, 1e-6f, 0.25f, rows, dim});
        return y;
      };
      const std::vector<float> want = run(L2NormRef);
      ForEachTarget([&] { ASSERT_TRUE(Identical(run(L2Norm), want)) << dim; });
      for (int64_t row = 0; row < rows; ++row) {
        const float* in = x.data() + 1 + row * stride;
        double sum = 1e-6f;
        for (int64_t i = 0; i < dim; ++i) sum += static_cast<double>(in[i]) * in[i];
        for (int64_t i = 0; i < dim; ++i) {
          const double y = in[i] / std::sqrt(sum) * 0.25;
          ASSERT_NEAR(want[static_cast<size_t>(1 + row * stride + i)], y,
                      std::fabs(y) * NormBound(dim));
        }
      }
    }
  }
}

TEST(GatedNorm, ParityInPlaceAndAccuracy) {
  Random random(43);
  for (int64_t dim : kDims) {
    for (int64_t rows : kCounts) {
      const std::vector<float> o = random.Normal(rows * dim + 1, 0.1f),
                               gate = random.Normal(rows * dim + 1, 4.0f);
      const std::vector<float> w = random.Normal(dim);
      const auto run = [&](void (*kernel)(const GatedNormParams&), bool over_gate) {
        std::vector<float> y = over_gate ? gate : o;
        kernel({over_gate ? o.data() + 1 : y.data() + 1, over_gate ? y.data() + 1 : gate.data() + 1,
                w.data(), 1e-5f, y.data() + 1, rows, dim});
        return y;
      };
      for (bool over_gate : {false, true}) {
        const std::vector<float> want = run(GatedNormRef, over_gate);
        ForEachTarget([&] { ASSERT_TRUE(Identical(run(GatedNorm, over_gate), want)) << dim; });
        for (int64_t row = 0; row < rows; ++row) {
          double sum = 0;
          for (int64_t i = 0; i < dim; ++i)
            sum += std::pow(static_cast<double>(o[static_cast<size_t>(1 + row * dim + i)]), 2);
          const double r = 1 / std::sqrt(sum / static_cast<double>(dim) + 1e-5);
          for (int64_t i = 0; i < dim; ++i) {
            const size_t at = static_cast<size_t>(1 + row * dim + i);
            const double y = o[at] * r * w[static_cast<size_t>(i)] * Sigmoid64(gate[at]);
            // 3 ulp = 6 u for the sigmoid.
            ASSERT_NEAR(want[at], y, std::fabs(y) * (NormBound(dim) + 8 * kUnit));
          }
        }
      }
    }
  }
}

// The order of the law, not just any order: the sum of squares added left to right is different.
TEST(NormCanary, PlainSumIsDifferent) {
  Random random(44);
  int different = 0;
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::vector<float> x = random.Normal(200);
    float sum = 0.0f;
    for (float v : x) sum = std::fma(v, v, sum);
    const float r = 1.0f / std::sqrt(sum + 1e-6f);
    std::vector<float> plain = x;
    for (float& v : plain) v *= r;
    L2Norm({x.data(), 200, 1e-6f, 1.0f, 1, 200});
    different += FirstDifference(x, plain) >= 0;
  }
  EXPECT_GT(different, 10);
}

TEST(ShortConv, ParitySplitsAndAccuracy) {
  Random random(45);
  for (int64_t channels : kDims) {
    for (int64_t taps : {1, 2, 4, 5}) {
      const int64_t tokens = random.Int(0, 12), stride = channels + 2;
      const std::vector<float> x = random.Normal(tokens * stride + 1),
                               w = random.Normal(taps * stride);
      const std::vector<float> tail = random.Normal((taps - 1) * stride + 1);
      // Output and tail of tokens fed `step` at a time, in two runs of channels.
      const auto run = [&](void (*kernel)(const ShortConvParams&), int64_t step) {
        std::vector<float> y(static_cast<size_t>(tokens * stride + 1), 77.0f), t = tail;
        for (int64_t begin = 0; begin < tokens; begin += step) {
          for (auto [c0, c1] :
               {std::pair<int64_t, int64_t>{0, channels / 3}, {channels / 3, channels}}) {
            kernel({x.data() + 1 + begin * stride, stride, t.data(), stride, w.data(), stride,
                    y.data() + 1 + begin * stride, stride, std::min(step, tokens - begin), taps, c0,
                    c1});
          }
        }
        y.insert(y.end(), t.begin(), t.end());
        return y;
      };
      const std::vector<float> want = run(ShortConvRef, std::max<int64_t>(tokens, 1));
      EXPECT_TRUE(Identical(run(ShortConvRef, 1), want));
      ForEachTarget([&] {
        for (int64_t step : {1, 2, 3, 50})
          ASSERT_TRUE(Identical(run(ShortConv, step), want)) << channels;
      });
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t c = 0; c < channels; ++c) {
          double sum = 0, size = 0;
          for (int64_t s = 0; s < taps; ++s) {
            const int64_t time = t - taps + 1 + s;
            const float in = time < 0 ? tail[static_cast<size_t>((taps - 1 + time) * stride + c)]
                                      : x[static_cast<size_t>(1 + time * stride + c)];
            sum += static_cast<double>(in) * w[static_cast<size_t>(s * stride + c)];
            size += std::fabs(static_cast<double>(in) * w[static_cast<size_t>(s * stride + c)]);
          }
          // SiLU's slope is below 1.1; its own error is 4 ulp = 8 u.
          const double y = Silu64(sum);
          ASSERT_NEAR(want[static_cast<size_t>(1 + t * stride + c)], y,
                      1.1 * Gamma(static_cast<double>(taps)) * size + 8 * kUnit * std::fabs(y));
        }
      }
    }
  }
}

TEST(Glu, ParityInPlaceAndAccuracy) {
  Random random(46);
  for (int64_t width : kDims) {
    const int64_t rows = random.Int(0, 9), stride = width + 1;
    const std::vector<float> gate = random.Normal(rows * stride + 1, 5.0f),
                             up = random.Normal(rows * stride + 1, 20.0f);
    for (auto [activation, linear] : {std::pair{Activation::kSilu, 0.0f},
                                      {Activation::kSitu, 25.0f},
                                      {Activation::kSitu, 0.0f}}) {
      const auto run = [&](void (*kernel)(const GluParams&), bool in_place) {
        std::vector<float> y = in_place ? up : std::vector<float>(up.size(), 77.0f);
        kernel({gate.data() + 1, in_place ? y.data() + 1 : up.data() + 1, stride, activation, 4.0f,
                linear, y.data() + 1, stride, rows, width});
        return y;
      };
      const std::vector<float> want = run(GluRef, false), in_place = run(GluRef, true);
      ForEachTarget([&] {
        ASSERT_TRUE(Identical(run(Glu, false), want)) << width;
        ASSERT_TRUE(Identical(run(Glu, true), in_place)) << width;
      });
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < width; ++i) {
          const size_t at = static_cast<size_t>(1 + row * stride + i);
          const double g = gate[at], u = up[at];
          double y =
              activation == Activation::kSilu ? Silu64(g) * u : 4 * std::tanh(g / 4) * Sigmoid64(g);
          if (activation == Activation::kSitu)
            y *= linear == 0.0f ? u : linear * std::tanh(u / linear);
          // Two tanh of 2 ulp, a sigmoid of 3 ulp, quotients (whose relative error tanh does not enlarge)
          // and products: 14 u + 7 u; 24 leaves room for their second order.
          ASSERT_NEAR(want[at], y, 24 * kUnit * std::fabs(y)) << g << " " << u;
        }
      }
    }
  }
}

TEST(SigmoidGate, ParityInPlaceAndAccuracy) {
  Random random(47);
  for (int64_t count : kDims) {
    const std::vector<float> x = random.Normal(count + 1), gate = random.Normal(count + 1, 6.0f);
    const auto run = [&](void (*kernel)(const SigmoidGateParams&)) {
      std::vector<float> y = x;
      kernel({y.data() + 1, gate.data() + 1, y.data() + 1, count});
      return y;
    };
    const std::vector<float> want = run(SigmoidGateRef);
    ForEachTarget([&] { ASSERT_TRUE(Identical(run(SigmoidGate), want)); });
    for (size_t i = 1; i < x.size(); ++i) {
      const double y = x[i] * Sigmoid64(gate[i]);
      ASSERT_NEAR(want[i], y, 8 * kUnit * std::fabs(y));
    }
  }
}

TEST(Combine, ParityAndAccuracy) {
  Random random(48);
  for (int64_t width : kDims) {
    for (int64_t top_k : {1, 2, 8, 16}) {
      const int64_t tokens = random.Int(0, 9);
      const std::vector<float> rows = random.Normal(tokens * top_k * width + 1);
      const std::vector<float> weights = random.UniformVector(tokens * top_k, 0.0f, 1.0f);
      const auto run = [&](void (*kernel)(const CombineParams&)) {
        std::vector<float> y(static_cast<size_t>(tokens * width + 1), 77.0f);
        kernel({rows.data() + 1, weights.data(), y.data() + 1, tokens, top_k, width});
        return y;
      };
      const std::vector<float> want = run(CombineRef);
      ForEachTarget([&] { ASSERT_TRUE(Identical(run(Combine), want)); });
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t i = 0; i < width; ++i) {
          double sum = 0, size = 0;
          for (int64_t r = 0; r < top_k; ++r) {
            const double term = static_cast<double>(weights[static_cast<size_t>(t * top_k + r)]) *
                                rows[static_cast<size_t>(1 + (t * top_k + r) * width + i)];
            sum += term;
            size += std::fabs(term);
          }
          ASSERT_NEAR(want[static_cast<size_t>(1 + t * width + i)], sum,
                      Gamma(static_cast<double>(top_k)) * size);
        }
      }
    }
  }
}

TEST(Add, Parity) {
  Random random(49);
  for (int64_t count : kDims) {
    const std::vector<float> x = random.Normal(count + 1), y = random.Normal(count + 1);
    std::vector<float> want = y;
    for (size_t i = 1; i < y.size(); ++i) want[i] = y[i] + x[i];
    const auto run = [&](void (*kernel)(const AddParams&)) {
      std::vector<float> sum = y;
      kernel({x.data() + 1, sum.data() + 1, count});
      return sum;
    };
    EXPECT_TRUE(Identical(run(AddRef), want));
    ForEachTarget([&] { ASSERT_TRUE(Identical(run(Add), want)); });
  }
}

TEST(AttnRes, ParityIntoASourceAndAccuracy) {
  Random random(50);
  for (int64_t dim : kDims) {
    for (int64_t count : {1, 2, 9, 64}) {
      const int64_t tokens = random.Int(0, 4);
      std::vector<std::vector<float>> sources;
      for (int64_t j = 0; j < count; ++j)
        sources.push_back(random.Normal(tokens * dim + 1, random.Uniform(0.1f, 30.0f)));
      const std::vector<float> w = random.Normal(dim, 0.5f);
      const auto run = [&](void (*kernel)(const AttnResParams&), bool into_last) {
        std::vector<float> out =
            into_last ? sources.back() : std::vector<float>(sources[0].size(), 77.0f);
        std::vector<const float*> views;
        for (const std::vector<float>& s : sources) views.push_back(s.data() + 1);
        if (into_last) views.back() = out.data() + 1;
        kernel({views.data(), count, w.data(), 1e-5f, out.data() + 1, tokens, dim});
        return out;
      };
      const std::vector<float> want = run(AttnResRef, false), into = run(AttnResRef, true);
      ForEachTarget([&] {
        ASSERT_TRUE(Identical(run(AttnRes, false), want)) << dim;
        ASSERT_TRUE(Identical(run(AttnRes, true), into)) << dim;
      });
      for (int64_t t = 0; t < tokens; ++t) {
        std::vector<double> p(static_cast<size_t>(count));
        double most = -1e300, sizes = 0, total = 0;
        for (int64_t j = 0; j < count; ++j) {
          const float* v = sources[static_cast<size_t>(j)].data() + 1 + t * dim;
          double dot = 0, size = 0, squares = 0;
          for (int64_t i = 0; i < dim; ++i) {
            dot += static_cast<double>(v[i]) * w[static_cast<size_t>(i)];
            size += std::fabs(static_cast<double>(v[i]) * w[static_cast<size_t>(i)]);
            squares += static_cast<double>(v[i]) * v[i];
          }
          const double r = 1 / std::sqrt(squares / static_cast<double>(dim) + 1e-5);
          p[static_cast<size_t>(j)] = dot * r;
          most = std::max(most, dot * r);
          sizes = std::max(sizes, size * r);
        }
        double least = 0;
        for (double& s : p) {
          least = std::min(least, s - most);
          total += s = std::exp(s - most);
        }
        // Scores err by ds = 2 NormBound * sum |v w| r, differences of two by twice that and a rounding;
        // weights relatively by that twice (the sum), and 2 u for exp, count u for the sum, 1 u to divide.
        const double n = static_cast<double>(count);
        const double weight =
            2 * (4 * NormBound(dim) * sizes + (-least + 3) * kUnit) + (n + 2) * kUnit;
        for (int64_t i = 0; i < dim; ++i) {
          double sum = 0, size = 0;
          for (int64_t j = 0; j < count; ++j) {
            const double term =
                p[static_cast<size_t>(j)] / total *
                sources[static_cast<size_t>(j)][static_cast<size_t>(1 + t * dim + i)];
            sum += term;
            size += std::fabs(term);
          }
          ASSERT_NEAR(want[static_cast<size_t>(1 + t * dim + i)], sum, (weight + Gamma(n)) * size);
        }
      }
    }
  }
}

}  // namespace
}  // namespace deltamesh::kernels

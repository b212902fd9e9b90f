#include <limits>

#include "tests/parity/common.h"
#include "tests/parity/math_simd.h"

namespace deltamesh::kernels {
namespace {

struct Function {
  MathFunction id;
  const char* name;
  double (*oracle)(double);
  double ulps;  // the bound that kernels/base/math.h states
};

double OracleSigmoid(double x) {
  return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x));
}
double OracleSoftplus(double x) { return std::fmax(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }
double OracleSilu(double x) { return x < -2000 ? -0.0 : x * OracleSigmoid(x); }

const Function kFunctions[] = {
    {MathFunction::kExp, "exp", [](double x) { return std::exp(x); }, 1},
    {MathFunction::kSigmoid, "sigmoid", OracleSigmoid, 3},
    {MathFunction::kTanh, "tanh", [](double x) { return std::tanh(x); }, 2},
    {MathFunction::kSoftplus, "softplus", OracleSoftplus, 3},
    {MathFunction::kSilu, "silu", OracleSilu, 4},
};

constexpr float kInf = std::numeric_limits<float>::infinity();

// Every 4099th float of both signs (a prime, so that low bits vary), the ends of the ranges and their
// neighbours, and random bits.
const std::vector<float>& Inputs() {
  static const std::vector<float> inputs = [] {
    std::vector<float> x;
    for (uint64_t bits = 0; bits <= 0xFFFFFFFFu; bits += 4099) {
      x.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
    }
    for (float edge : {0.0f, 0.625f, 1.0f, 20.0f, 87.0f, 87.33655f, 88.0f, 88.72284f, 89.0f,
                       103.97208f, 104.0f, 105.0f, 200.0f, 1e30f, kInf}) {
      for (float value : {edge, std::nextafter(edge, 0.0f), std::nextafter(edge, kInf)}) {
        x.push_back(value);
        x.push_back(-value);
      }
    }
    for (float v = -120.0f; v < 120.0f; v += 1.0f / 4099) x.push_back(v);
    Random random(31);
    for (int i = 0; i < 500000; ++i) {
      x.push_back(std::bit_cast<float>(static_cast<uint32_t>(random.Bits())));
    }
    return x;
  }();
  return inputs;
}

// Spacing of float32 at a value, the subnormal spacing included.
double Ulp(double value) {
  const double size = std::fabs(value);
  return size < 0x1p-126 ? 0x1p-149 : std::ldexp(1.0, std::ilogb(size) - 23);
}

TEST(MathParity, VectorsEqualScalarsForEveryInput) {
  const std::vector<float>& x = Inputs();
  const int64_t count = static_cast<int64_t>(x.size());
  for (const Function& f : kFunctions) {
    std::vector<float> want(x.size());
    MathScalar(f.id, x.data(), want.data(), count);
    ForEachTarget([&] {
      std::vector<float> y(x.size());
      MathSimd(f.id, x.data(), y.data(), count);
      const int64_t i = FirstDifference(y, want);
      EXPECT_LT(i, 0) << f.name << "(" << std::hexfloat << x[static_cast<size_t>(i)] << ") is "
                      << y[static_cast<size_t>(i)] << ", scalar " << want[static_cast<size_t>(i)];
    });
  }
}

TEST(MathAccuracy, WithinTheStatedUlps) {
  const std::vector<float>& x = Inputs();
  for (const Function& f : kFunctions) {
    std::vector<float> y(x.size());
    MathScalar(f.id, x.data(), y.data(), static_cast<int64_t>(x.size()));
    double worst = 0;
    float worst_at = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      if (std::isnan(x[i])) {
        ASSERT_TRUE(std::isnan(y[i])) << f.name << " must pass NaN on";
        continue;
      }
      const double want = f.oracle(x[i]);
      if (std::isinf(y[i]) || std::isinf(want)) {
        ASSERT_EQ(y[i], static_cast<float>(want)) << f.name << "(" << x[i] << ")";
        continue;
      }
      const double error = std::fabs(y[i] - want);
      if (f.id == MathFunction::kSilu && x[i] < -87.0f) {
        ASSERT_LT(error, 0x1p-140) << "silu(" << x[i] << ")";
        continue;
      }
      if (error / Ulp(want) > worst) {
        worst = error / Ulp(want);
        worst_at = x[i];
      }
    }
    EXPECT_LE(worst, f.ulps) << f.name << " at " << std::hexfloat << worst_at;
    std::printf("%-8s worst %.3f ulp at %g\n", f.name, worst, worst_at);
  }
}

float One(MathFunction f, float x) {
  float y;
  MathScalar(f, &x, &y, 1);
  return y;
}

TEST(MathEnds, ExactAtInfinitiesAndZeros) {
  EXPECT_EQ(One(MathFunction::kExp, -kInf), 0.0f);
  EXPECT_EQ(One(MathFunction::kExp, kInf), kInf);
  EXPECT_EQ(One(MathFunction::kExp, 0.0f), 1.0f);
  EXPECT_EQ(One(MathFunction::kExp, -103.9f), 0x1p-149f);
  EXPECT_EQ(One(MathFunction::kExp, -104.0f), 0.0f);
  EXPECT_EQ(One(MathFunction::kSigmoid, -kInf), 0.0f);
  EXPECT_EQ(One(MathFunction::kSigmoid, kInf), 1.0f);
  EXPECT_EQ(One(MathFunction::kSigmoid, 0.0f), 0.5f);
  EXPECT_EQ(One(MathFunction::kTanh, -kInf), -1.0f);
  EXPECT_EQ(One(MathFunction::kTanh, kInf), 1.0f);
  EXPECT_TRUE(SameBits(One(MathFunction::kTanh, -0.0f), -0.0f));
  EXPECT_EQ(One(MathFunction::kSoftplus, -kInf), 0.0f);
  EXPECT_EQ(One(MathFunction::kSoftplus, kInf), kInf);
  EXPECT_TRUE(SameBits(One(MathFunction::kSilu, -kInf), -0.0f));
  EXPECT_EQ(One(MathFunction::kSilu, kInf), kInf);
}

// Code 8, minus zero, is +0: the law of gemm.h.
TEST(MxDecode, FourLanesGiveTheSixteenValues) {
  const float want[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  ForEachTarget([&] {
    float values[16];
    MxValuesOfFourLanes(values);
    for (int i = 0; i < 16; ++i) EXPECT_TRUE(SameBits(values[i], want[i])) << "code " << i;
  });
}

TEST(CpuFeatures, TargetsCanBeForced) {
  ASSERT_TRUE(CpuCanRun());
  EXPECT_FALSE(CpuRequirement().empty());
  const std::vector<std::string> targets = CpuTargets();
  ASSERT_FALSE(targets.empty());
  EXPECT_FALSE(ForceCpuTarget("SSE4"));
  ASSERT_TRUE(ForceCpuTarget(targets.back()));
  EXPECT_EQ(CpuTargets(), std::vector<std::string>{targets.back()});
  ASSERT_TRUE(ForceCpuTarget(""));
  EXPECT_EQ(CpuTargets(), targets);
}

}  // namespace
}  // namespace deltamesh::kernels

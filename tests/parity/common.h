// Shared by the parity tests: every kernel against its reference, bit for bit, on each target of
// this CPU.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/base/cpu_features.h"

namespace deltamesh::kernels {

// Runs `body` once per target with that target forced, then returns to the best one.
template <class Body>
void ForEachTarget(const Body& body) {
  ASSERT_TRUE(CpuCanRun()) << "needs " << CpuRequirement();
  for (const std::string& target : CpuTargets()) {
    SCOPED_TRACE("target " + target);
    ASSERT_TRUE(ForceCpuTarget(target));
    body();
  }
  ASSERT_TRUE(ForceCpuTarget(""));
}

inline bool SameBits(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

// Index of the first element whose bits differ, or -1. NaNs are all the same.
inline int64_t FirstDifference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!SameBits(a[i], b[i])) return static_cast<int64_t>(i);
  }
  return -1;
}

inline ::testing::AssertionResult Identical(const std::vector<float>& got,
                                            const std::vector<float>& want) {
  const int64_t i = FirstDifference(got, want);
  if (i < 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "first difference at " << i << " of " << want.size() << ": " << std::hexfloat << got[i]
         << " instead of " << want[i];
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  int64_t Int(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine_);
  }
  float Uniform(float low, float high) {
    return std::uniform_real_distribution<float>(low, high)(engine_);
  }
  uint64_t Bits() { return engine_(); }
  // Standard normal values times `scale`.
  std::vector<float> Normal(int64_t count, float scale = 1.0f) {
    std::normal_distribution<float> normal(0.0f, scale);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& v : values) v = normal(engine_);
    return values;
  }
  std::vector<float> UniformVector(int64_t count, float low, float high) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& v : values) v = Uniform(low, high);
    return values;
  }

 private:
  std::mt19937_64 engine_;
};

// Unit roundoff of float32 and the usual bound of n roundings in a row: n u / (1 - n u).
inline constexpr double kUnit = 0x1p-24;
inline double Gamma(double n) { return n * kUnit / (1 - n * kUnit); }

}  // namespace deltamesh::kernels

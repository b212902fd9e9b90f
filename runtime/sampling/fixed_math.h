// exp and log in double by fixed operations, so that a token drawn on one machine is drawn on all:
// the C library's versions differ in the last bits between versions and processors.
#pragma once

#include <bit>
#include <cstdint>

namespace deltamesh {

// e^x for x <= 0, within 2 ulp; below -700 it is 0 (such a token cannot be drawn anyway).
inline double FixedExp(double x) {
  if (!(x > -700.0)) return 0.0;
  if (x > 0.0) x = 0.0;
  constexpr double kInvLn2 = 0x1.71547652b82fep+0;
  constexpr double kLn2High = 0x1.62e42fee00000p-1;  // n * high is exact for every n in range
  constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
  const int64_t n = static_cast<int64_t>(x * kInvLn2 - 0.5);  // to nearest, x is not positive
  const double r = (x - static_cast<double>(n) * kLn2High) - static_cast<double>(n) * kLn2Low;
  // Taylor to r^13 on |r| <= ln2 / 2: the first term left out is below 5e-18.
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  return p * std::bit_cast<double>((n + 1023) << 52);
}

// Natural logarithm of a normal x > 0, absolute error below 1e-15 * max(1, |log x|).
inline double FixedLog(double x) {
  constexpr double kLn2 = 0x1.62e42fefa39efp-1;
  uint64_t bits = std::bit_cast<uint64_t>(x);
  int64_t e = static_cast<int64_t>(bits >> 52) - 1023;
  double m = std::bit_cast<double>((bits & 0xFFFFFFFFFFFFFull) | (uint64_t{1023} << 52));  // [1, 2)
  if (m > 0x1.6a09e667f3bcdp+0) {
    m *= 0.5;
    ++e;
  }
  // log m = 2 atanh(s), |s| <= 0.1716: the first term left out is below 1e-18.
  const double s = (m - 1.0) / (m + 1.0);
  const double q = s * s;
  double p = 1.0 / 23.0;
  for (int k = 21; k >= 1; k -= 2) p = p * q + 1.0 / k;
  return static_cast<double>(e) * kLn2 + 2.0 * s * p;
}

}  // namespace deltamesh

// Elementary functions of float32 as fixed sequences of IEEE operations (add, multiply, fused
// multiply-add, divide): the same bits on every target. math-inl.h holds the same sequences for
// vectors; a change here is a change there.
//
// All of them accept every float. NaN gives NaN (its payload is not specified); subnormal results
// are rounded like any other, so the floating-point unit must not flush them to zero.
//
//   function   largest error        at the ends
//   Exp        1 ulp                0 below -103.98; +inf above 88.72
//   Sigmoid    3 ulp                0 and 1
//   Tanh       2 ulp                -1 and 1; tanh(-0) = -0
//   Softplus   3 ulp                0 and +inf
//   Silu       4 ulp above -87      -0 at -inf, where x * sigmoid(x) alone would be NaN; below -87
//                                   sigmoid is subnormal and the error stays below 2^-140
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace deltamesh::kernels {

namespace math_internal {

inline constexpr float kLog2E = 0x1.715476p+0f;
// ln 2 in two parts; the first has 16 bits, so its product with an exponent is exact.
inline constexpr float kLn2High = 0x1.62e4p-1f;
inline constexpr float kLn2Low = 0x1.7f7d1cp-20f;
// Adding it leaves round-to-nearest(x) in the low bits of the significand.
inline constexpr float kRoundMagic = 0x1.8p+23f;
// Beyond these the result is 0 and +inf whatever the argument.
inline constexpr float kExpLow = -105.0f;
inline constexpr float kExpHigh = 89.0f;
// exp(r) = 1 + r + r^2 * poly(r), |r| <= ln(2) / 2 * 1.01, minimax in relative error: 3.3e-9.
inline constexpr float kExpPoly[5] = {0x1.fffffcp-2f, 0x1.55548ap-3f, 0x1.555916p-5f,
                                      0x1.123fc6p-7f, 0x1.6a1a72p-10f};
// tanh(x) = x + x^3 * poly(x^2), |x| <= 0.64, minimax in relative error: 5.7e-9.
inline constexpr float kTanhSmall = 0.625f;
inline constexpr float kTanhPoly[5] = {-0x1.55552ap-2f, 0x1.110552p-3f, -0x1.b7fd5p-5f,
                                       0x1.50820cp-6f, -0x1.6e69aap-8f};
// log1p(e) = t + t^3 * poly(t^2) with t = 2 e / (2 + e), 0 <= e <= 1, relative error: 4.8e-9.
inline constexpr float kLog1pPoly[4] = {0x1.5554fcp-4f, 0x1.99d45cp-7f, 0x1.1e946p-9f,
                                        0x1.1fab6p-11f};
// Silu does not change below it; it keeps -inf out of the product.
inline constexpr float kSiluLow = -200.0f;

inline float PowerOfTwo(int32_t n) {
  return std::bit_cast<float>(static_cast<uint32_t>(n + 127) << 23);
}

template <int N>
float Horner(const float (&c)[N], float x) {
  float p = c[N - 1];
  for (int i = N - 2; i >= 0; --i) p = std::fma(p, x, c[i]);
  return p;
}

}  // namespace math_internal

inline float Exp(float x) {
  using namespace math_internal;
  x = x > kExpHigh ? kExpHigh : x;
  x = x < kExpLow ? kExpLow : x;
  const float shifted = std::fma(x, kLog2E, kRoundMagic);
  const float n = shifted - kRoundMagic;
  float r = std::fma(n, -kLn2High, x);
  r = std::fma(n, -kLn2Low, r);
  float p = Horner(kExpPoly, r);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  // Unsigned, so that a NaN's meaningless exponent wraps instead of overflowing.
  const uint32_t exponent = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRoundMagic);
  const int32_t half = static_cast<int32_t>(exponent) >> 1;
  const int32_t rest = static_cast<int32_t>(exponent - static_cast<uint32_t>(half));
  // Two factors, because 2^n alone is not always a normal number. The last product rounds once.
  return (p * PowerOfTwo(half)) * PowerOfTwo(rest);
}

inline float Sigmoid(float x) {
  const float e = Exp(-std::fabs(x));
  const float numerator = x < 0.0f ? e : 1.0f;
  return numerator / (1.0f + e);
}

inline float Tanh(float x) {
  using namespace math_internal;
  const float a = std::fabs(x);
  const float z = a * a;
  const float small = std::fma(a * z, Horner(kTanhPoly, z), a);
  const float large = 1.0f - 2.0f / (Exp(a + a) + 1.0f);
  return std::copysign(a < kTanhSmall ? small : large, x);
}

inline float Softplus(float x) {
  using namespace math_internal;
  const float e = Exp(-std::fabs(x));
  const float t = (e + e) / (2.0f + e);
  const float z = t * t;
  const float log1p = std::fma(t * z, Horner(kLog1pPoly, z), t);
  return (x > 0.0f ? x : 0.0f) + log1p;
}

inline float Silu(float x) {
  x = x < math_internal::kSiluLow ? math_internal::kSiluLow : x;
  return x * Sigmoid(x);
}

}  // namespace deltamesh::kernels

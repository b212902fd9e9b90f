#include "runtime/transfer/crc32c_combine.h"

#include <array>
#include <cstddef>

namespace deltamesh {
namespace {

// Polynomials over GF(2) of degree below 32, reflected: the highest bit is the coefficient of x^0.
constexpr uint32_t kPolynomial = 0x82F63B78u;
constexpr uint32_t kOne = 1u << 31;
constexpr uint32_t kXToThe8 = 1u << 23;

constexpr uint32_t MultiplyModulo(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
  }
  return product;
}

// x^8 squared as often as the index says.
constexpr std::array<uint32_t, 64> kPowers = [] {
  std::array<uint32_t, 64> powers{kXToThe8};
  for (size_t i = 1; i < powers.size(); ++i) {
    powers[i] = MultiplyModulo(powers[i - 1], powers[i - 1]);
  }
  return powers;
}();

}  // namespace

// Appending one byte multiplies by x^8; the inversions before and after a CRC cancel.
uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b) {
  if (crc_a == 0) return crc_b;
  for (size_t i = 0; bytes_b != 0; bytes_b >>= 1, ++i) {
    if (bytes_b & 1) crc_a = MultiplyModulo(crc_a, kPowers[i]);
  }
  return crc_a ^ crc_b;
}

}  // namespace deltamesh

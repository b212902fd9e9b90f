#include "runtime/transfer/crc32c_combine.h"

namespace deltamesh {
namespace {

// Polynomials over GF(2) of degree below 32, reflected: the highest bit is the coefficient of x^0.
constexpr uint32_t kPolynomial = 0x82F63B78u;
constexpr uint32_t kOne = 1u << 31;
constexpr uint32_t kXToThe8 = 1u << 23;

uint32_t MultiplyModulo(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
  }
  return product;
}

}  // namespace

// Appending one byte multiplies by x^8; the inversions before and after a CRC cancel.
uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, uint64_t bytes_b) {
  uint32_t shift = kOne;
  uint32_t power = kXToThe8;
  for (; bytes_b != 0; bytes_b >>= 1) {
    if (bytes_b & 1) shift = MultiplyModulo(shift, power);
    power = MultiplyModulo(power, power);
  }
  return MultiplyModulo(crc_a, shift) ^ crc_b;
}

}  // namespace deltamesh

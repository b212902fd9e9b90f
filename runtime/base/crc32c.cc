#include "runtime/base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace deltamesh {
namespace {

constexpr std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ (0x82F63B78u & (0u - (c & 1)));
    table[i] = c;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kTable = MakeTable();

uint32_t Portable(const unsigned char* p, size_t n, uint32_t c) {
  for (size_t i = 0; i < n; ++i) c = kTable[(c ^ p[i]) & 0xFF] ^ (c >> 8);
  return c;
}

#if defined(__x86_64__)
// The instruction takes three cycles and may start every cycle, so long inputs go in three lanes at once. A
// lane's state moves on by the length of the lanes behind it in zero bytes, which is linear.
constexpr size_t kLane = 4096;

class LaneShift {
 public:
  LaneShift() {
    const std::array<unsigned char, kLane> zeros{};
    for (size_t byte = 0; byte < 4; ++byte) {
      auto& table = tables_[byte];
      for (int bit = 0; bit < 8; ++bit) {
        table[size_t{1} << bit] =
            Portable(zeros.data(), kLane, uint32_t{1} << (8 * byte + static_cast<size_t>(bit)));
      }
      for (size_t v = 1; v < 256; ++v) table[v] = table[v & (v - 1)] ^ table[v & (~v + 1)];
    }
  }
  uint64_t operator()(uint64_t c) const {
    return tables_[0][c & 0xFF] ^ tables_[1][c >> 8 & 0xFF] ^ tables_[2][c >> 16 & 0xFF] ^
           tables_[3][c >> 24 & 0xFF];
  }

 private:
  std::array<std::array<uint32_t, 256>, 4> tables_{};
};

uint64_t Word(const unsigned char* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

__attribute__((target("sse4.2"))) uint32_t Hardware(const unsigned char* p, size_t n, uint32_t c) {
  uint64_t c64 = c;
  if (n >= 3 * kLane) {
    static const LaneShift shift;
    for (; n >= 3 * kLane; p += 3 * kLane, n -= 3 * kLane) {
      uint64_t second = 0, third = 0;
      for (size_t i = 0; i < kLane; i += 8) {
        c64 = _mm_crc32_u64(c64, Word(p + i));
        second = _mm_crc32_u64(second, Word(p + kLane + i));
        third = _mm_crc32_u64(third, Word(p + 2 * kLane + i));
      }
      c64 = shift(shift(c64) ^ second) ^ third;
    }
  }
  for (; n >= 8; p += 8, n -= 8) c64 = _mm_crc32_u64(c64, Word(p));
  c = static_cast<uint32_t>(c64);
  for (; n > 0; ++p, --n) c = _mm_crc32_u8(c, *p);
  return c;
}
#endif

}  // namespace

uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t seed) {
  const auto* p = reinterpret_cast<const unsigned char*>(bytes.data());
#if defined(__x86_64__)
  static const bool has_sse42 = __builtin_cpu_supports("sse4.2");
  if (has_sse42) return ~Hardware(p, bytes.size(), ~seed);
#endif
  return ~Portable(p, bytes.size(), ~seed);
}

}  // namespace deltamesh

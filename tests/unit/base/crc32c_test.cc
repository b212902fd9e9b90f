#include "runtime/base/crc32c.h"

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

namespace deltamesh {
namespace {

std::span<const std::byte> Bytes(std::string_view s) {
  return {reinterpret_cast<const std::byte*>(s.data()), s.size()};
}

// Bit by bit, straight from the polynomial.
uint32_t Slow(std::span<const std::byte> bytes) {
  uint32_t c = ~0u;
  for (const std::byte b : bytes) {
    c ^= static_cast<uint32_t>(b);
    for (int i = 0; i < 8; ++i) c = (c & 1) ? (c >> 1) ^ 0x82F63B78u : c >> 1;
  }
  return ~c;
}

// The check value of the catalogue and the vectors of RFC 3720, B.4.
TEST(Crc32c, KnownVectors) {
  EXPECT_EQ(Crc32c(Bytes("123456789")), 0xE3069283u);
  EXPECT_EQ(Crc32c(Bytes("")), 0u);
  EXPECT_EQ(Crc32c(std::vector<std::byte>(32, std::byte{0x00})), 0x8A9136AAu);
  EXPECT_EQ(Crc32c(std::vector<std::byte>(32, std::byte{0xFF})), 0x62A8AB43u);
}

TEST(Crc32c, EqualsTheBitwiseFormAtEveryLengthAndOffset) {
  std::vector<std::byte> data(200);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * 37 + 11);
  for (size_t offset = 0; offset < 9; ++offset) {
    for (size_t n = 0; offset + n <= 100; ++n) {
      const std::span<const std::byte> part(data.data() + offset, n);
      ASSERT_EQ(Crc32c(part), Slow(part)) << offset << " " << n;
    }
  }
}

// Long inputs are taken in lanes of 4 KiB, three at a time.
TEST(Crc32c, EqualsTheBitwiseFormAcrossLanes) {
  std::vector<std::byte> data(2 * 3 * 4096 + 40);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::byte>(i * i * 31 + i / 7);
  for (const size_t lanes : {size_t{3 * 4096}, size_t{2 * 3 * 4096}}) {
    for (size_t n = lanes - 9; n <= lanes + 17; ++n) {
      const std::span<const std::byte> part(data.data() + n % 5, n);
      ASSERT_EQ(Crc32c(part), Slow(part)) << n;
      ASSERT_EQ(Crc32c(part.subspan(7), Crc32c(part.first(7))), Slow(part)) << n;
    }
  }
}

TEST(Crc32c, ContinuesFromASeed) {
  const std::string_view text = "moved in pieces, checked as a whole";
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    EXPECT_EQ(Crc32c(Bytes(text.substr(cut)), Crc32c(Bytes(text.substr(0, cut)))),
              Crc32c(Bytes(text)));
  }
}

TEST(Crc32c, EveryFlippedBitShows) {
  std::vector<std::byte> data(64, std::byte{0x5A});
  const uint32_t before = Crc32c(data);
  for (size_t bit = 0; bit < data.size() * 8; ++bit) {
    data[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    EXPECT_NE(Crc32c(data), before) << bit;
    data[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
  }
}

}  // namespace
}  // namespace deltamesh

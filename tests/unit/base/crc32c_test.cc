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

std::vector<std::byte> Noise(size_t n) {
  std::vector<std::byte> data(n);
  for (size_t i = 0; i < n; ++i) data[i] = static_cast<std::byte>(i * i * 31 + i / 7);
  return data;
}

TEST(Crc32c, EveryWayEqualsTheBitwiseFormAtEveryLengthAndOffset) {
  const std::vector<std::byte> data = Noise(300);
  for (const Crc32cWay way : Crc32cWays()) {
    for (size_t offset = 0; offset < 9; ++offset) {
      for (size_t n = 0; offset + n <= 200; ++n) {
        const auto part = std::span(data).subspan(offset, n);
        ASSERT_EQ(Crc32cBy(way, part, 0), Slow(part)) << offset << " " << n;
      }
    }
  }
}

// Lanes of 4 KiB go three at a time, folding takes 256 bytes at a time and at least two of them.
TEST(Crc32c, EveryWayEqualsTheBitwiseFormWhereItsLoopsBeginAndEnd) {
  const std::vector<std::byte> data = Noise(2 * 3 * 4096 + 40);
  for (const size_t edge : {512u, 768u, 1024u, 4096u, 3u * 4096u, 2u * 3u * 4096u}) {
    for (size_t n = edge - 9; n <= edge + 17; ++n) {
      const auto part = std::span(data).subspan(n % 5, n);
      const uint32_t expected = Slow(part);
      for (const Crc32cWay way : Crc32cWays()) {
        ASSERT_EQ(Crc32cBy(way, part, 0), expected) << n;
        const uint32_t begun = Crc32cBy(way, part.first(7), 0);
        ASSERT_EQ(Crc32cBy(way, part.subspan(7), begun), expected) << n;
      }
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

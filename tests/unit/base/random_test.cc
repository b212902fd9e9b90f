#include "runtime/base/random.h"

#include <gtest/gtest.h>

#include <set>

namespace deltamesh {
namespace {

// Known answers of the Random123 distribution (kat_vectors, philox4x32 with 10 rounds).
TEST(Philox, KnownAnswers) {
  using A4 = std::array<uint32_t, 4>;
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}), (A4{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (A4{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (A4{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, UniformIsInRangeAndKeyedByEveryArgument) {
  std::set<float> seen;
  double sum = 0;
  for (uint64_t i = 0; i < 4096; ++i) {
    const float u = PhiloxUniform(7, i, 0);
    ASSERT_GE(u, 0.0f);
    ASSERT_LT(u, 1.0f);
    sum += u;
    seen.insert(u);
  }
  EXPECT_NEAR(sum / 4096, 0.5, 5 * 0.2887 / 64);  // five standard errors of a uniform mean
  EXPECT_GT(seen.size(), 4090u);
  EXPECT_NE(PhiloxUniform(7, 1, 0), PhiloxUniform(8, 1, 0));
  EXPECT_NE(PhiloxUniform(7, 1, 0), PhiloxUniform(7, 1, 1));
  EXPECT_NE(PhiloxUniform(7, 1, 0), PhiloxUniform(7, (uint64_t{1} << 32) + 1, 0));
  EXPECT_NE(PhiloxUniform(7, 1, 0), PhiloxUniform((uint64_t{1} << 32) + 7, 1, 0));
}

TEST(SeededEntropy, RepeatsAndDiffers) {
  SeededEntropy a(1), b(1), c(2);
  for (int i = 0; i < 8; ++i) {
    const uint64_t x = a.Next();
    EXPECT_EQ(x, b.Next());
    EXPECT_NE(x, c.Next());
  }
}

TEST(SystemEntropy, DoesNotRepeat) {
  SystemEntropy e;
  std::set<uint64_t> seen;
  for (int i = 0; i < 64; ++i) seen.insert(e.Next());
  EXPECT_EQ(seen.size(), 64u);
}

}  // namespace
}  // namespace deltamesh

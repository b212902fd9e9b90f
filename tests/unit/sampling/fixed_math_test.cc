#include "runtime/sampling/fixed_math.h"

#include <gtest/gtest.h>

#include <cmath>

namespace deltamesh {
namespace {

TEST(FixedMath, ExpIsWithinTwoUlp) {
  EXPECT_EQ(FixedExp(0), 1.0);
  EXPECT_EQ(FixedExp(-1e9), 0.0);
  EXPECT_EQ(FixedExp(-INFINITY), 0.0);
  for (double x = -699.9; x < 0; x += 0.0137) {
    const double want = std::exp(x);
    ASSERT_NEAR(FixedExp(x), want, 2 * 0x1p-52 * want) << x;
  }
}

TEST(FixedMath, LogIsWithinItsBound) {
  EXPECT_EQ(FixedLog(1), 0.0);
  for (double x = 1e-10; x < 1e12; x *= 1.00731) {
    const double want = std::log(x);
    ASSERT_NEAR(FixedLog(x), want, 1e-15 * std::max(1.0, std::fabs(want))) << x;
  }
}

// Other bits here mean other tokens on other machines.
TEST(FixedMath, BitsAreFixed) {
  EXPECT_EQ(FixedExp(-1.0), 0x1.78b56362cef38p-2);
  EXPECT_EQ(FixedLog(10.0), 0x1.26bb1bbb55515p+1);
}

}  // namespace
}  // namespace deltamesh

// How fast state moves between two workers, as a router believes.
#include "services/router/link_rates.h"

#include <gtest/gtest.h>

#include <limits>

namespace deltamesh {
namespace {

constexpr LinkId kA = 1, kB = 2;

TEST(LinkRatesTest, APairCountsAsTheMeshUntilItIsMeasured) {
  LinkRates rates;
  EXPECT_FALSE(rates.known());
  EXPECT_EQ(rates.Between(kA, "d"), LinkRates::kAssumed);
  rates.Moved(kA, "d", 1e8);  // a prompt that computed meanwhile
  rates.Moved(kB, "d", 4e8);
  EXPECT_TRUE(rates.known());
  EXPECT_FALSE(rates.differ());
  EXPECT_EQ(rates.Between(kA, "d"), 4e8);
  rates.Measured(kA, "d", 2e8);
  EXPECT_TRUE(rates.differ());
  EXPECT_EQ(rates.Between(kA, "d"), 2e8);
  EXPECT_EQ(rates.Between(kA, "e"), 4e8);
  EXPECT_EQ(rates.Between(kB, "d"), 4e8);
  rates.Measured(kB, "d", 9e9);
  EXPECT_EQ(rates.Between(kB, "d"), 4e8) << "no transfer was that quick";
}

TEST(LinkRatesTest, WhatWasMeasuredInABusyMinuteIsOutdoneByTransfers) {
  LinkRates rates;
  rates.Moved(kB, "d", 4e8);
  rates.Measured(kA, "d", 1e7);
  rates.Moved(kA, "d", 3e8);
  EXPECT_EQ(rates.Between(kA, "d"), 3e8);
  for (int i = 0; i < 1000; ++i) {
    rates.Moved(kA, "d", 1e6);
    rates.Moved(kB, "d", 4e8);
  }
  EXPECT_EQ(rates.Between(kA, "d"), 1e7) << "and counts again when they have become slow";
}

TEST(LinkRatesTest, TheBestOfLateFades) {
  LinkRates rates;
  rates.Moved(kA, "d", 4e8);
  rates.Moved(kA, "d", 1);
  EXPECT_DOUBLE_EQ(rates.Between(kA, "d"), 0.99 * 4e8);
}

TEST(LinkRatesTest, OddNumbersAreNoRatesAndWhatIsKnownIsBounded) {
  LinkRates rates;
  const double odd[] = {0, -1, std::numeric_limits<double>::infinity(),
                        std::numeric_limits<double>::quiet_NaN()};
  for (const double rate : odd) {
    rates.Moved(kA, "d", rate);
    rates.Measured(kA, "d", rate);
  }
  EXPECT_FALSE(rates.known() || rates.differ());
  rates.Moved(kA, "d", 4e8);
  for (size_t i = 0; i <= LinkRates::kReceiversMax; ++i) {
    rates.Measured(kA, std::to_string(i), 1e8);
  }
  EXPECT_EQ(rates.Between(kA, "0"), 1e8);
  EXPECT_EQ(rates.Between(kA, std::to_string(LinkRates::kReceiversMax)), 4e8);
  rates.Measured(kA, "0", 2e8);
  EXPECT_EQ(rates.Between(kA, "0"), 2e8);
  rates.Forget(kA);
  EXPECT_EQ(rates.Between(kA, "0"), 4e8);
  EXPECT_FALSE(rates.differ());
}

}  // namespace
}  // namespace deltamesh

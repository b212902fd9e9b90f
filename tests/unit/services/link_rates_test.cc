// How fast state moves between two workers, as a router believes.
#include "services/router/link_rates.h"

#include <gtest/gtest.h>

#include <limits>

namespace deltamesh {
namespace {

constexpr LinkId kA = 1, kB = 2;
const std::string kNameD = "d", kNameE = "e";
const Receiver kD = {kNameD, 1}, kE = {kNameE, 1};

TEST(LinkRatesTest, APairCountsAsTheMeshUntilItIsMeasured) {
  LinkRates rates;
  EXPECT_FALSE(rates.known());
  EXPECT_EQ(rates.Between(kA, kD), LinkRates::kAssumed);
  rates.Moved(kA, kD, 1e8);  // a prompt that computed meanwhile
  rates.Moved(kB, kD, 4e8);
  EXPECT_TRUE(rates.known());
  EXPECT_FALSE(rates.differ());
  EXPECT_EQ(rates.Between(kA, kD), 4e8);
  rates.Measured(kA, kD, 2e8);
  EXPECT_TRUE(rates.differ());
  EXPECT_EQ(rates.Between(kA, kD), 2e8);
  EXPECT_EQ(rates.Between(kA, kE), 4e8);
  EXPECT_EQ(rates.Between(kB, kD), 4e8);
  rates.Measured(kB, kD, 9e9);
  EXPECT_EQ(rates.Between(kB, kD), 4e8) << "no transfer was that quick";
}

TEST(LinkRatesTest, WhatWasMeasuredInABusyMinuteIsOutdoneByTransfers) {
  LinkRates rates;
  rates.Moved(kB, kD, 4e8);
  rates.Measured(kA, kD, 1e7);
  rates.Moved(kA, kD, 3e8);
  EXPECT_EQ(rates.Between(kA, kD), 3e8);
  for (int i = 0; i < 1000; ++i) {
    rates.Moved(kA, kD, 1e6);
    rates.Moved(kB, kD, 4e8);
  }
  EXPECT_EQ(rates.Between(kA, kD), 1e7) << "and counts again when they have become slow";
}

TEST(LinkRatesTest, TheBestOfLateFades) {
  LinkRates rates;
  rates.Moved(kA, kD, 4e8);
  rates.Moved(kA, kD, 1);
  EXPECT_DOUBLE_EQ(rates.Between(kA, kD), 0.99 * 4e8);
}

TEST(LinkRatesTest, OddNumbersAreNoRatesAndWhatIsKnownIsBounded) {
  LinkRates rates;
  const double odd[] = {0, -1, std::numeric_limits<double>::infinity(),
                        std::numeric_limits<double>::quiet_NaN()};
  for (const double rate : odd) {
    rates.Moved(kA, kD, rate);
    rates.Measured(kA, kD, rate);
  }
  EXPECT_FALSE(rates.known() || rates.differ());
  rates.Moved(kA, kD, 4e8);
  for (size_t i = 0; i <= LinkRates::kReceiversMax; ++i) {
    rates.Measured(kA, {std::to_string(i), 1}, 1e8);
  }
  EXPECT_EQ(rates.pairs(), static_cast<int64_t>(LinkRates::kReceiversMax));
  EXPECT_EQ(rates.Between(kA, {std::to_string(LinkRates::kReceiversMax), 1}), 1e8) << "the newest";
  rates.Forget(kA);
  EXPECT_EQ(rates.Between(kA, kD), 4e8);
  EXPECT_FALSE(rates.differ());
}

TEST(LinkRatesTest, NoPairCountsForMoreThanTheMesh) {
  LinkRates rates;
  rates.Measured(kA, kD, 4e8);
  rates.Moved(kA, kD, 4e8);
  for (int i = 0; i < 300; ++i) rates.Moved(kB, kD, 1e8);
  EXPECT_EQ(rates.Between(kA, kD), 1e8);
}

TEST(LinkRatesTest, ASlowPairIsTriedAgainAfterItsSendersOthers) {
  LinkRates rates;
  rates.Moved(kB, kD, 4e8);
  rates.Measured(kA, kD, 1e7);
  rates.Measured(kA, kE, 4e8);
  for (int i = 0; i < 1000; ++i) rates.Moved(kB, kD, 4e8);
  EXPECT_EQ(rates.Between(kA, kD), 1e7) << "others' say nothing";
  for (int i = 0; i < 100; ++i) rates.Moved(kA, kE, 4e8);
  EXPECT_NEAR(rates.Between(kA, kD), 1e7 * 2.718, 1e5);
  for (int i = 0; i < 400; ++i) rates.Moved(kA, kE, 4e8);
  EXPECT_EQ(rates.Between(kA, kD), 4e8);
  rates.Moved(kA, kD, 1e7);
  EXPECT_NEAR(rates.Between(kA, kD), 1e7, 1) << "it is as slow as before";
}

TEST(LinkRatesTest, AnotherLifeOfAReceiverIsAnotherReceiver) {
  LinkRates rates;
  rates.Moved(kB, kD, 4e8);
  rates.Measured(kA, kD, 1e7);
  EXPECT_EQ(rates.Between(kA, {kNameD, 2}), 4e8);
  rates.Measured(kA, {kNameD, 2}, 2e7);
  EXPECT_EQ(rates.Between(kA, {kNameD, 2}), 2e7);
  EXPECT_EQ(rates.Between(kA, kD), 4e8);
}

}  // namespace
}  // namespace deltamesh

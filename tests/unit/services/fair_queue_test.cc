#include "services/router/fair_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <optional>

#include "runtime/base/random.h"
#include "services/router/drain_rate.h"

namespace deltamesh {
namespace {

using ::testing::ElementsAre;

constexpr absl::Time kStart = absl::UnixEpoch();

QueuedRequest Make(const std::string& id, const std::string& tenant, int64_t cost,
                   absl::Duration at = absl::ZeroDuration(),
                   absl::Duration handicap = absl::ZeroDuration()) {
  return {.id = id, .tenant = tenant, .cost = cost, .since = kStart + at, .handicap = handicap};
}

TEST(FairQueueTest, TurnsByHand) {
  FairQueue queue({.turn_tokens = 100, .ageing_max = absl::Seconds(1)});
  for (const char* id : {"a1", "a2", "a3"}) queue.Push(Make(id, "a", 60));
  queue.Push(Make("b1", "b", 150));
  queue.Push(Make("b2", "b", 10));
  EXPECT_EQ(queue.tokens(), 340);
  std::vector<std::string> order;
  while (!queue.empty()) {
    order.push_back(queue.Candidates().front());
    queue.Take(order.back());
  }
  // a: 100 - 60 = 40, too little for a2; b: 100, too little for b1; a: 140 - 60 - 60 = 20; b: 200 - 150 - 10.
  EXPECT_THAT(order, ElementsAre("a1", "a2", "a3", "b1", "b2"));
  EXPECT_EQ(queue.tokens(), 0);
  EXPECT_EQ(queue.tenants(), 0);
}

TEST(FairQueueTest, OneTenantIsServedAsItCame) {
  FairQueue queue({.turn_tokens = 1, .ageing_max = absl::Seconds(1)});
  queue.Push(Make("x", "", 1000));
  queue.Push(Make("y", "", 1));
  EXPECT_THAT(queue.Candidates(), ElementsAre("x"));
  queue.Take("x");
  EXPECT_THAT(queue.Candidates(), ElementsAre("y"));
}

TEST(FairQueueTest, WhoPassesPaysWhatIsLeft) {
  FairQueue queue({.turn_tokens = 100, .ageing_max = absl::Seconds(1)});
  queue.Push(Make("large", "a", 90));
  for (const char* id : {"b1", "b2"}) queue.Push(Make(id, "b", 50));
  EXPECT_THAT(queue.Candidates(), ElementsAre("large", "b1"));
  queue.Take("b1");  // large finds no room
  queue.Take("b2");
  queue.Push(Make("b3", "b", 50));
  EXPECT_THAT(queue.Candidates(), ElementsAre("large", "b3"));  // still its turn
  EXPECT_FALSE(queue.Aged("large", kStart + absl::Milliseconds(999)));
  EXPECT_TRUE(queue.Aged("large", kStart + absl::Seconds(1)));
}

TEST(FairQueueTest, WhoLeavesIsForgotten) {
  FairQueue queue({.turn_tokens = 100, .ageing_max = absl::Seconds(1)});
  queue.Push(Make("a1", "a", 1));
  queue.Push(Make("b1", "b", 1));
  queue.Remove("a1");
  queue.Remove("a1");
  EXPECT_EQ(queue.SizeOf("a"), 0);
  EXPECT_THAT(queue.Candidates(), ElementsAre("b1"));
  queue.Remove("b1");
  EXPECT_TRUE(queue.empty());
  EXPECT_TRUE(queue.Candidates().empty());
}

// One tenant asks for all it can get, others for more than their share; costs and turns are drawn. While two
// tenants wait, what they are given in turn stays within turn_tokens + 2 * the costliest request.
TEST(FairQueueTest, SharesStayWithinTheBoundWhateverOneAsksFor) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SeededEntropy entropy(seed);
    const auto pick = [&](uint64_t n) { return static_cast<int64_t>(entropy.Next() % n); };
    const int64_t turn = 1 + pick(3000), cost_max = 1 + pick(5000);
    const int64_t tenants = 2 + pick(4);
    FairQueue queue({.turn_tokens = turn, .ageing_max = absl::Seconds(1)});
    std::map<std::string, int64_t> served;
    std::map<std::string, std::string> tenant_of;
    std::map<std::string, int64_t> cost_of;
    int64_t next = 0;
    const auto push = [&](int64_t t) {
      const std::string id = std::to_string(next++), tenant(1, static_cast<char>('a' + t));
      tenant_of[id] = tenant;
      cost_of[id] = pick(static_cast<uint64_t>(cost_max) + 1);
      queue.Push(Make(id, tenant, cost_of[id], absl::Seconds(next)));
    };
    for (int64_t i = 0; i < 300; ++i) push(0);  // the flood
    for (int64_t t = 1; t < tenants; ++t) push(t);
    for (int step = 0; step < 2000; ++step) {
      if (pick(2) == 0) push(0);
      const std::string id = queue.Candidates().front();
      const std::string tenant = tenant_of[id];
      push(tenant[0] - 'a');  // the modest ones too are never without a wish
      queue.Take(id);
      served[tenant] += cost_of[id];
      for (const auto& [one, tokens] : served) {
        for (const auto& [other, more] : served) {
          ASSERT_LE(std::abs(tokens - more), turn + 2 * cost_max)
              << "seed " << seed << " step " << step << ": " << one << " against " << other;
        }
      }
    }
    EXPECT_EQ(served.size(), static_cast<size_t>(tenants));
  }
}

// Cheap requests keep coming; each is passed only by those that arrive at most ageing_max after it.
TEST(FairQueueTest, NobodyIsPassedByThoseWhoCameMuchLater) {
  constexpr absl::Duration kAgeing = absl::Seconds(3);
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SeededEntropy entropy(seed);
    FairQueue queue({.turn_tokens = 1000, .ageing_max = kAgeing});
    std::map<std::string, absl::Time> waiting;
    int passed = 0;
    for (int step = 0; step < 3000; ++step) {
      const absl::Duration at = step * absl::Milliseconds(20);
      const int64_t cost = entropy.Next() % 10 == 0 ? 100000 : 10;
      const std::string id = std::to_string(step);
      queue.Push(Make(id, "", cost, at, absl::Milliseconds(cost)));  // 100 s for a costly one
      waiting[id] = kStart + at;
      if (entropy.Next() % 20 == 0) continue;  // a little behind, always
      const std::string first = queue.Candidates().front();
      queue.Take(first);
      const absl::Time since = waiting.at(first);
      waiting.erase(first);
      for (const auto& [other, earlier] : waiting) {
        passed += earlier < since;
        ASSERT_LE(since - earlier, kAgeing) << first << " passed " << other;
      }
    }
    EXPECT_GT(passed, 100);  // costly ones did let cheap ones pass
  }
}

TEST(FairQueueTest, TimeUntilServedCountsTheTurnsOfOthers) {
  FairQueue queue({.turn_tokens = 100, .ageing_max = absl::Seconds(1)});
  for (int i = 0; i < 10; ++i) queue.Push(Make(std::to_string(i), "flood", 100));
  EXPECT_EQ(queue.TokensUntilServed("small", 30), 60);
  EXPECT_EQ(queue.TokensUntilServed("flood", 50), 1050);
  queue.Push(Make("s", "small", 30));
  EXPECT_EQ(queue.TokensUntilServed("flood", 50), 1080);
}

TEST(DrainRateTest, CountsOnlyTimeInWhichSomebodyWaits) {
  DrainRate rate;
  absl::Time now = kStart;
  rate.Pass(now, false);
  EXPECT_EQ(rate.tokens_per_second(), 0);
  rate.Pass(now += absl::Seconds(100), false);
  EXPECT_EQ(rate.tokens_per_second(), 0);
  for (int i = 0; i < 10; ++i) {
    rate.Placed(500);
    rate.Pass(now += absl::Seconds(1), true);
  }
  EXPECT_DOUBLE_EQ(rate.tokens_per_second(), 500);
  for (int i = 0; i < 200; ++i) {  // the pace changes
    rate.Placed(100);
    rate.Pass(now += absl::Seconds(1), true);
  }
  EXPECT_NEAR(rate.tokens_per_second(), 100, 5);
}

}  // namespace
}  // namespace deltamesh

// Policies under traffic: small runs equal brute force, and the bars are met at a size that a test can run.
#include "services/simulate/cache_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <sstream>

#include "absl/container/flat_hash_set.h"
#include "runtime/base/status.h"
#include "services/simulate/agent_traffic.h"
#include "services/simulate/document_traffic.h"
#include "services/simulate/free_state_cache.h"
#include "services/simulate/sim_random.h"
#include "services/simulate/simulation.h"

namespace deltamesh {
namespace {

using testing::HasSubstr;

constexpr int64_t kSnapshot = 449372160, kBlock = 27648 * 64;

CacheRunResult Run(Traffic& traffic, const std::string& policy, double bytes) {
  absl::StatusOr<CachePolicy> named = PolicyNamed(policy);
  CHECK_OK(named.status());
  const auto result =
      RunCache(traffic, *named,
               {.bytes_max = static_cast<int64_t>(bytes), .block = kBlock, .snapshot = kSnapshot});
  CHECK_OK(result.status());
  return *result;
}
CacheRunResult Agents(int64_t sessions, const std::string& policy, double bytes = 1e18) {
  AgentTraffic traffic({.seed = 1, .sessions = sessions});
  return Run(traffic, policy, bytes);
}
CacheRunResult Documents(int64_t documents, const std::string& policy, double bytes) {
  DocumentTraffic traffic({.seed = 1, .requests = 1500, .documents = documents});
  return Run(traffic, policy, bytes);
}

// What `policy` finds, from sets of names alone; memory is without end.
class Twin {
 public:
  explicit Twin(std::string policy) : policy_(std::move(policy)) {}

  int64_t Prompt(const Turn& turn) {
    int64_t found = 0;
    for (int64_t i = 0; i < turn.prompt_blocks() && latents_.contains(Key(turn, i)); ++i) {
      if (states_.contains(Key(turn, i))) found = i + 1;
    }
    for (int64_t i = 0; i < turn.prompt_blocks(); ++i) {
      const bool last = i + 1 == turn.prompt_blocks();
      if (policy_ == "bound" || (policy_ == "tail" && last) ||
          (policy_ == "grid:2048" && (i + 1) % 32 == 0 && !last)) {
        AddState(turn, i);
      }
    }
    return found;
  }
  void Answer(const Turn& turn) {
    for (int64_t i = 0; policy_ == "bound" && i < turn.answer_blocks(); ++i) AddState(turn, i);
  }

 private:
  static const PrefixKey& Key(const Turn& turn, int64_t block) {
    return (*turn.keys)[static_cast<size_t>(block)];
  }
  // Latents beyond the last state would be held by nobody.
  void AddState(const Turn& turn, int64_t block) {
    states_.insert(Key(turn, block));
    while (block >= 0 && latents_.insert(Key(turn, block)).second) --block;
  }

  const std::string policy_;
  absl::flat_hash_set<PrefixKey> latents_, states_;
};

int64_t TwinRestored(const std::string& policy, int64_t sessions) {
  AgentTraffic traffic({.seed = 1, .sessions = sessions});
  Twin twin(policy);
  std::map<std::pair<double, int64_t>, Turn> live;
  int64_t restored = 0, count = 0;
  for (;;) {
    const auto next = traffic.NextAt();
    if (!live.empty() && (!next || live.begin()->first.first <= *next)) {
      const auto [key, turn] = *live.begin();
      live.erase(live.begin());
      twin.Answer(turn);
      traffic.Finished(turn, key.first);
    } else if (next) {
      const Turn turn = traffic.Next();
      restored += twin.Prompt(turn) * 64;
      live.emplace(std::pair(turn.at + turn.answer_seconds, ++count), turn);
    } else {
      return restored;
    }
  }
}

TEST(CacheRun, EqualsBruteForce) {
  for (const char* policy : {"bound", "tail", "grid:2048"}) {
    EXPECT_EQ(Agents(3, policy).restored_tokens, TwinRestored(policy, 3)) << policy;
  }
}

// Least recently used first, leaf before parent, by looking at everything.
TEST(FreeStateCache, EqualsBruteForce) {
  constexpr size_t kBlocks = 20;
  FreeStateCache cache(kBlocks, 1);
  std::map<std::vector<int>, uint64_t> twin;  // the words up to a block: its last use
  SimRandom random(1, 1);
  uint64_t clock = 0;
  for (int step = 0; step < 4000; ++step) {
    std::vector<int> words;
    for (uint64_t n = 1 + random.Below(8); n > 0; --n) {
      words.push_back(static_cast<int>(random.Below(3)));
    }
    const auto first = [&](size_t n) {
      return std::vector<int>(words.begin(), words.begin() + static_cast<int64_t>(n));
    };
    std::vector<PrefixKey> path;
    for (size_t i = 1; i <= words.size(); ++i) {
      PrefixKey key;
      key.bytes[0] = static_cast<uint8_t>(i);
      for (size_t j = 0; j < i; ++j) key.bytes[1 + j] = static_cast<uint8_t>(words[j] + 1);
      path.push_back(key);
    }
    int64_t found = 0;
    while (found < static_cast<int64_t>(words.size()) &&
           twin.contains(first(static_cast<size_t>(found + 1)))) {
      ++found;
    }
    ASSERT_EQ(cache.Use(path), found) << step;
    cache.Add(path);
    ++clock;
    for (size_t i = 1; i <= words.size(); ++i) twin[first(i)] = clock;
    while (twin.size() > kBlocks) {
      auto oldest = twin.end();
      for (auto b = twin.begin(); b != twin.end(); ++b) {
        const auto after = std::next(b);  // in this order a block's first child follows it
        const bool leaf = after == twin.end() || after->first.size() <= b->first.size() ||
                          !std::equal(b->first.begin(), b->first.end(), after->first.begin());
        if (leaf && (oldest == twin.end() || b->second < oldest->second)) oldest = b;
      }
      twin.erase(oldest);
    }
    ASSERT_EQ(cache.blocks(), static_cast<int64_t>(twin.size())) << step;
  }
  EXPECT_GT(cache.evicted(), 1000);
}

// The generator's acceptance: plain policies reach on it what they reached on the sessions it was made from.
TEST(Bars, PlainPoliciesReachWhatWasMeasured) {
  const struct {
    const char* policy;
    double measured;
  } table[] = {{"bound", 96.84},     {"tail+junction+end", 96.45}, {"tail+junction", 96.14},
               {"tail", 95.76},      {"grid:2048", 95.72},         {"grid:8192", 93.19},
               {"grid:16384", 89.73}};
  double above = 100;
  for (const auto& row : table) {
    const double reached = 100 * Agents(142, row.policy).hit_rate();
    EXPECT_NEAR(reached, row.measured, 1) << row.policy;
    EXPECT_LT(reached, above) << row.policy;
    above = reached;
  }
}

TEST(Bars, AgentsAreNearTheBoundWithAndWithoutPressure) {
  const CacheRunResult free = Agents(142, "ours");
  EXPECT_LT(Agents(142, "bound").hit_rate() - free.hit_rate(), 0.006);
  // 2.5 TB for 710 sessions.
  EXPECT_LT(static_cast<double>(free.snapshot_bytes_peak), 2.5e12 * 142 / 710);
  EXPECT_LT(Agents(142, "bound", 0.3e12).hit_rate() - Agents(142, "ours", 0.3e12).hit_rate(), 0.01);
}

TEST(Bars, DocumentsAreServedAsWellAsByTheBestFixedPolicy) {
  const std::vector<std::string> fixed = {"grid:2048", "grid:4096", "grid:8192", "tail+junction",
                                          "tail+junction+end"};
  // Without a bound a dense grid finds more, for many times the bytes; with one it is no rival.
  const std::vector<std::string> dense = {"grid:512", "grid:1024"};
  for (const double bytes : {1e18, 0.5e12, 0.2e12}) {
    for (const int64_t documents : {100, 800}) {
      std::vector<std::string> policies = fixed;
      if (bytes < 1e18) policies.insert(policies.end(), dense.begin(), dense.end());
      double best = 0;
      for (const std::string& policy : policies) {
        best = std::max(best, Documents(documents, policy, bytes).hit_rate());
      }
      EXPECT_GT(Documents(documents, "ours", bytes).hit_rate(), best - 0.01)
          << bytes << " " << documents;
    }
  }
}

TEST(Simulation, TheSameSeedGivesTheSameReport) {
  SimulationOptions options;
  options.sessions = 12;
  options.policies = {"bound", "ours", "grid:2048"};
  options.cache_bytes = 0.1e12;
  const auto run = [&] {
    const auto document = Simulate(options, nullptr);
    CHECK_OK(document.status());
    std::ostringstream text;
    PrintSimulation(*document, text);
    return text.str() + document->dump(1);
  };
  const std::string first = run();
  EXPECT_EQ(first, run());
  options.seed = 2;
  EXPECT_NE(first, run());
}

TEST(Simulation, ErrorsNameTheFlagAndTheRemedy) {
  const auto message = [](void (*change)(SimulationOptions&)) {
    SimulationOptions options;
    change(options);
    return MessageOf(Simulate(options, nullptr).status());
  };
  EXPECT_THAT(message([](auto& o) { o.policies = {"best"}; }), HasSubstr("policy: \"best\""));
  EXPECT_THAT(message([](auto& o) { o.policies = {"grid:100"}; }), HasSubstr("multiple of 64"));
  EXPECT_THAT(message([](auto& o) { o.sessions = 0; }), HasSubstr("sessions"));
  EXPECT_THAT(message([](auto& o) {
                o.decode_workers = 1;
                o.prefill_workers = std::numeric_limits<int64_t>::max();
              }),
              HasSubstr("prefill-workers"));
  for (const double odd : {std::numeric_limits<double>::quiet_NaN(),
                           std::numeric_limits<double>::infinity(), -1.0, 1e300}) {
    const auto refused = [&](auto change) {
      SimulationOptions options;
      options.decode_workers = 1;
      change(options);
      const std::string message = MessageOf(Simulate(options, nullptr).status());
      EXPECT_THAT(message, HasSubstr("; use "));
      return message.substr(0, message.find(':'));
    };
    EXPECT_EQ(refused([&](auto& o) { o.hours = odd; }), "hours");
    EXPECT_EQ(refused([&](auto& o) { o.cache_bytes = odd; }), "cache");
    EXPECT_EQ(refused([&](auto& o) { o.link_bytes_per_second = odd; }), "link");
    EXPECT_EQ(refused([&](auto& o) { o.rates.prompt_tokens_per_second = odd; }), "prompt-rate");
    EXPECT_EQ(refused([&](auto& o) { o.rates.step_seconds = odd; }), "step-ms");
    EXPECT_EQ(refused([&](auto& o) { o.rates.token_seconds = odd; }), "token-ms");
  }
  EXPECT_THAT(message([](auto& o) { o.traffic = "/none"; }), HasSubstr("/none"));
  EXPECT_THAT(message([](auto& o) { o.config = "/none.json"; }), HasSubstr("/none.json"));
}

}  // namespace
}  // namespace deltamesh

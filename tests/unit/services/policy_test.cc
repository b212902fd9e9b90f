#include "services/router/policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <vector>

namespace deltamesh {
namespace {

WorkerLoad Load(const std::string& name) {
  return {.name = name, .slabs_free = 4, .blocks_free = 64, .context_tokens = 1000};
}
RequestShape Shape(std::string_view id) {
  return {.affinity = id, .compute_tokens = 100, .blocks = 2, .context_tokens = 128};
}

std::vector<Candidate> PricedOf(std::span<const WorkerLoad> workers, const RequestShape& request,
                                std::span<const Holding> holdings, const MeanRates& rates) {
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < workers.size(); ++i) {
    candidates.push_back({.load = &workers[i],
                          .holding = holdings.empty() ? Holding() : holdings[i],
                          .cost = {},
                          .fetch = {}});
  }
  Price(candidates, request, rates);
  return candidates;
}

// Where nobody knows the rate of prompts. `holdings` is empty or has one for each worker.
std::vector<Candidate> PricedOf(std::span<const WorkerLoad> workers, const RequestShape& request,
                                std::span<const Holding> holdings = {}) {
  double sum = 0;
  int known = 0;
  for (const WorkerLoad& w : workers) {
    const double rate = std::max(w.prompt_tokens_per_second, w.tokens_per_second);
    sum += rate;
    known += rate > 0;
  }
  return PricedOf(workers, request, holdings, {.any = known > 0 ? sum / known : 0});
}

std::optional<size_t> Choose(std::span<const WorkerLoad> workers, const RequestShape& request,
                             std::span<const Holding> holdings = {}) {
  return Cheapest(PricedOf(workers, request, holdings), request);
}

double CostOf(const WorkerLoad& worker, const Holding& holding, double rate) {
  return PricedOf({&worker, 1}, Shape("x"), {&holding, 1}, {.any = rate})[0].cost.total();
}

TEST(PolicyTest, WhatAWorkerHoldsAndWhatMustMoveCount) {
  std::vector<WorkerLoad> w = {Load("a"), Load("b"), Load("c")};
  for (WorkerLoad& load : w) load.prompt_tokens_per_second = 10;
  EXPECT_EQ(Choose(w, Shape("x"), std::vector<Holding>{{}, {64}, {}}), 1u);
  // 64 tokens are 6.4 s of this rate.
  w[1].waiting_tokens = 63;
  EXPECT_EQ(Choose(w, Shape("x"), std::vector<Holding>{{}, {64}, {}}), 1u);
  EXPECT_NE(Choose(w, Shape("x"), std::vector<Holding>{{}, {64, 0.2}, {}}), 1u);
  const auto c = PricedOf(w, Shape("x"), std::vector<Holding>{{0, 9}, {64, 9}, {32, 1}});
  EXPECT_EQ(Cheapest(c, Shape("x")), 2u);
  EXPECT_DOUBLE_EQ(c[2].cost.total(), 6.8 + 1);
}

// What lies on a worker's disk is read where that is quicker than computing what it saves.
TEST(PolicyTest, ColdSnapshotsCostTheTimeToReadThem) {
  std::vector<WorkerLoad> w = {Load("a"), Load("b")};
  for (WorkerLoad& load : w) load.prompt_tokens_per_second = 10;
  Candidate c = {.load = &w[1], .holding = {}, .cost = {}, .fetch = {}};
  const auto seconds = [&](double bytes_per_second, int64_t warm, int64_t cold, int64_t bytes) {
    w[1].store_bytes_per_second = bytes_per_second;
    c.holding = {.cached_tokens = warm, .disk = {.tokens = cold, .bytes = bytes}};
    Price({&c, 1}, Shape("x"), {});
    EXPECT_EQ(c.cached_tokens(), c.read() ? cold : warm);
    EXPECT_DOUBLE_EQ(c.read_seconds, c.cost.move);
    return c.cost.total();
  };
  EXPECT_DOUBLE_EQ(seconds(1000, 64, 0, 0), 3.6);      // in memory, and nothing deeper
  EXPECT_DOUBLE_EQ(seconds(1000, 0, 64, 500), 4.102);  // half a second for 6.4
  EXPECT_EQ(c.read_from, ReadFrom::kDisk);
  EXPECT_DOUBLE_EQ(seconds(1000, 32, 64, 500), 4.102);  // for 3.2
  EXPECT_DOUBLE_EQ(seconds(100, 32, 64, 500), 6.8);     // 5 for 3.2: it goes on from memory
  EXPECT_EQ(c.read_from, ReadFrom::kNothing);
  EXPECT_DOUBLE_EQ(seconds(100, 0, 64, 500), 8.602);  // 5 for 6.4
  EXPECT_DOUBLE_EQ(seconds(1, 0, 64, 1000), 10);      // then it computes all
  // Who has not measured its disk or itself reads, and so learns.
  EXPECT_DOUBLE_EQ(seconds(0, 32, 64, 500000000), 3.6 + 1.002);
  EXPECT_DOUBLE_EQ(seconds(0, 32, 64, 5000000000), 3.6 + 10.002);
  w[1].prompt_tokens_per_second = 0;
  w[1].tokens_per_second = 10;
  EXPECT_DOUBLE_EQ(seconds(1, 32, 64, 1000), 3.6 + 1000.002);
  w[1] = w[0];
  w[1].name = "b";
  w[1].store_bytes_per_second = 1000;
  const std::vector<Holding> warm_or_cold = {{.cached_tokens = 64},
                                             {.disk = {.tokens = 64, .bytes = 1}}};
  EXPECT_EQ(Choose(w, Shape("x"), warm_or_cold), 0u);
}

// Of two tiers the deeper state is read, unless computing takes less: then the other one's.
TEST(PolicyTest, TheDeeperOfDiskAndObjectStoreIsReadWhereThatIsQuicker) {
  WorkerLoad w = Load("a");
  w.prompt_tokens_per_second = 10;
  w.store_bytes_per_second = 1000;
  Candidate c = {.load = &w, .holding = {}, .cost = {}, .fetch = {}};
  const auto from = [&](int64_t disk, int64_t objects, double object_rate) {
    w.object_bytes_per_second = object_rate;
    c.holding = {.cached_tokens = 16,
                 .disk = {.tokens = disk, .bytes = 500},
                 .objects = {.tokens = objects, .bytes = 900}};
    Price({&c, 1}, Shape("x"), {});
    return c.read_from;
  };
  EXPECT_EQ(from(0, 64, 1000), ReadFrom::kObjects);
  EXPECT_EQ(c.cached_tokens(), 64);
  EXPECT_DOUBLE_EQ(c.read_seconds, 0.902);
  EXPECT_DOUBLE_EQ(c.cost.total(), 3.6 + 0.902);
  EXPECT_EQ(from(32, 64, 1000), ReadFrom::kObjects);
  EXPECT_EQ(from(64, 64, 1e9), ReadFrom::kDisk) << "of equals the nearer";
  EXPECT_EQ(from(64, 32, 1e9), ReadFrom::kDisk);
  EXPECT_EQ(from(32, 64, 10), ReadFrom::kDisk) << "90 s for 4.8";
  EXPECT_EQ(c.cached_tokens(), 32);
  EXPECT_DOUBLE_EQ(c.read_seconds, 0.502);
  EXPECT_EQ(from(0, 64, 10), ReadFrom::kNothing);
  EXPECT_EQ(c.cached_tokens(), 16);
  EXPECT_EQ(from(0, 16, 1e9), ReadFrom::kNothing) << "no deeper than memory";
  EXPECT_EQ(from(0, 64, 0), ReadFrom::kObjects) << "not measured yet";
}

// A state elsewhere is brought when that is quicker than computing what it saves; the quickest of several.
TEST(PolicyTest, StatesElsewhereAreBroughtWhenThatIsQuicker) {
  WorkerLoad w = Load("a");
  w.prompt_tokens_per_second = 10;
  Candidate c = {.load = &w, .holding = {.cached_tokens = 20}, .cost = {}, .fetch = {}};
  c.holding.fetches[0] = {.source = 3, .tokens = 64, .bytes = 9, .seconds = 4.5};
  c.holding.fetches[1] = {.source = 5, .tokens = 60, .bytes = 9, .seconds = 3};
  const auto price = [&](size_t offers, bool must) {
    c.holding.fetch_count = offers;
    c.holding.must_fetch = must;
    Price({&c, 1}, Shape("x"), {});
    return c.cost.total();
  };
  EXPECT_DOUBLE_EQ(price(0, false), 8);
  EXPECT_DOUBLE_EQ(price(1, false), 8);  // 4.5 + 3.6 would be longer
  EXPECT_EQ(c.offer(), nullptr);
  EXPECT_EQ(c.cached_tokens(), 20);
  EXPECT_DOUBLE_EQ(price(1, true), 8.1);
  EXPECT_EQ(c.offer()->source, 3u);
  EXPECT_DOUBLE_EQ(price(2, false), 7);
  EXPECT_EQ(c.offer()->source, 5u);
  EXPECT_EQ(c.cached_tokens(), 60);
  EXPECT_DOUBLE_EQ(c.cost.move, 3);
  EXPECT_DOUBLE_EQ(price(2, true), 7);
  // What it would read from its disk first, it does not read then.
  w.store_bytes_per_second = 1;
  c.holding.disk = {.tokens = 63, .bytes = 4};
  EXPECT_DOUBLE_EQ(price(2, false), 7);
  EXPECT_EQ(c.read(), nullptr);
  EXPECT_EQ(c.cached_tokens(), 60);
  EXPECT_DOUBLE_EQ(price(1, false), 3.7 + 4.002);
  EXPECT_EQ(c.read_from, ReadFrom::kDisk);
  EXPECT_EQ(c.cached_tokens(), 63);
}

TEST(PolicyTest, PromptsAreEstimatedByTheRateOfPrompts) {
  std::vector<WorkerLoad> w = {Load("a"), Load("b")};
  w[0].tokens_per_second = 5;
  w[0].prompt_tokens_per_second = 50;
  w[1].tokens_per_second = 20;
  EXPECT_EQ(Choose(w, Shape("x")), 0u);
}

TEST(PolicyTest, SkipsWorkersWithoutRoom) {
  std::vector<WorkerLoad> w = {Load("a"), Load("b"), Load("c"), Load("d"), Load("e")};
  w[0].slabs_free = 0;
  w[1].blocks_free = 1;
  w[2].context_tokens = 127;
  w[3].draining = true;
  w[4].waiting_tokens = 1000000;
  EXPECT_EQ(Choose(w, Shape("x")), 4u);
  w[4].draining = true;
  EXPECT_EQ(Choose(w, Shape("x")), std::nullopt);
  EXPECT_EQ(Choose({}, Shape("x")), std::nullopt);
}

TEST(PolicyTest, TakesTheLeastWorkInSeconds) {
  std::vector<WorkerLoad> w = {Load("a"), Load("b")};
  w[0].waiting_tokens = 100;
  EXPECT_EQ(Choose(w, Shape("x")), 1u);
  // Twice the queue, but four times as fast.
  w[0].waiting_tokens = 1000;
  w[1].waiting_tokens = 500;
  w[0].tokens_per_second = 400;
  w[1].tokens_per_second = 100;
  EXPECT_EQ(Choose(w, Shape("x")), 0u);
  // An unknown rate counts as the mean of the known ones: not shunned.
  w[1].tokens_per_second = 0;
  EXPECT_EQ(Choose(w, Shape("x")), 1u);
}

TEST(PolicyTest, EstimateByHand) {
  WorkerLoad w = Load("a");
  w.waiting_tokens = 50;
  w.resident = 10;
  EXPECT_DOUBLE_EQ(CostOf(w, {}, 16), (50 + 10 + 100) / 16.0);
  w.tokens_per_second = 32;
  EXPECT_DOUBLE_EQ(CostOf(w, {}, 16), (50 + 10 + 100) / 32.0);
}

// What others wait counts as a share of the usual first token, not of this one, which may be a long prompt's.
TEST(PolicyTest, AWaitOfOthersCountsByUsualTimes) {
  WorkerLoad w = Load("a");
  RequestShape request = Shape("x");
  EXPECT_EQ(StallWeight(w, request, 3), 0) << "nobody waits";
  w.resident = 4;
  EXPECT_EQ(StallWeight(w, request, 3), 1) << "nobody knows how long answers take";
  request.answer_seconds = 80;
  EXPECT_DOUBLE_EQ(StallWeight(w, request, 3), 4 * 3 / 80.0);
  request.first_token_seconds = 2;
  EXPECT_DOUBLE_EQ(StallWeight(w, request, 3), 4 * 2 / 80.0);
  w.resident = 4000;
  EXPECT_EQ(StallWeight(w, request, 3), 1);
}

TEST(PolicyTest, TiesGoToMoreRoomThenSpreadByAStableHash) {
  std::vector<WorkerLoad> w = {Load("a"), Load("b"), Load("c")};
  w[2].slabs_free = 5;
  EXPECT_EQ(Choose(w, Shape("x")), 2u);
  w[2].slabs_free = 4;
  std::map<size_t, int> counts;
  for (int i = 0; i < 300; ++i) ++counts[*Choose(w, Shape("request-" + std::to_string(i)))];
  for (size_t i = 0; i < 3; ++i) EXPECT_GT(counts[i], 60) << i;
  // The order in which workers are listed must not matter.
  std::vector<WorkerLoad> reversed(w.rbegin(), w.rend());
  for (int i = 0; i < 50; ++i) {
    const std::string id = "request-" + std::to_string(i);
    EXPECT_EQ(w[*Choose(w, Shape(id))].name, reversed[*Choose(reversed, Shape(id))].name);
  }
}

// Until a rate is known costs are tokens; the seconds of moving are then no part of them.
TEST(PolicyTest, TokensAndSecondsAreNeverAddedUp) {
  std::vector<WorkerLoad> w = {Load("a"), Load("b")};
  w[0].waiting_tokens = 32;
  const auto price = [&](const Holding& a, double prompt_rate, double any_rate) {
    std::vector<Candidate> c(2);
    for (size_t i = 0; i < 2; ++i) c[i].load = &w[i];
    c[0].holding = a;
    Price(c, Shape("x"), {.prompts = prompt_rate, .any = any_rate});
    return c;
  };
  auto c = price({.cached_tokens = 64, .transfer_seconds = 500}, 0, 0);
  EXPECT_FALSE(c[0].cost.measured);
  EXPECT_DOUBLE_EQ(c[0].cost.total(), 32 + 36) << "not 568 of something";
  EXPECT_DOUBLE_EQ(c[0].cost.move, 500);
  EXPECT_EQ(Cheapest(c, Shape("x")), 0u);
  // Of equal work what needs no moving goes first.
  w[0].waiting_tokens = 64;
  c = price({.cached_tokens = 64, .transfer_seconds = 0.001}, 0, 0);
  EXPECT_DOUBLE_EQ(c[0].cost.total(), c[1].cost.total());
  for (int i = 0; i < 16; ++i) EXPECT_EQ(Cheapest(c, Shape(std::to_string(i))), 1u);
  // What lies on disk, or elsewhere, is worth the tokens it saves.
  w[0].store_bytes_per_second = 1;
  c = price({.disk = {.tokens = 64, .bytes = 1 << 20}}, 0, 0);
  EXPECT_DOUBLE_EQ(c[0].cost.compute, 36);
  Holding offered = {.fetch_count = 1};
  offered.fetches[0] = {.tokens = 64, .bytes = 1, .seconds = 90};
  c = price(offered, 0, 0);
  EXPECT_NE(c[0].offer(), nullptr);
  EXPECT_DOUBLE_EQ(c[0].cost.total(), 64 + 36);
  // One rate anywhere, and all are seconds.
  for (const auto& [prompt, any] : {std::pair(10.0, 0.0), std::pair(0.0, 10.0)}) {
    c = price({.cached_tokens = 64, .transfer_seconds = 500}, prompt, any);
    EXPECT_TRUE(c[0].cost.measured && c[1].cost.measured);
    EXPECT_DOUBLE_EQ(c[0].cost.total(), 6.4 + 500 + 3.6);
  }
}

TEST(PolicyTest, HashIsFixedForever) {
  // FNV-1a's offset basis over the one zero byte, and a published vector with the byte appended by hand.
  EXPECT_EQ(PlacementHash("", ""), 0xcbf29ce484222325u * 0x100000001b3u);
  EXPECT_NE(PlacementHash("ab", "c"), PlacementHash("a", "bc"));
}

}  // namespace
}  // namespace deltamesh

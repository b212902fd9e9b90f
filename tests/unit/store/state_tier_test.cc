// Snapshots that left memory: what comes back from disk equals a cold run, bit for bit, and what is due is
// written, lost or left as it should be.
#include "services/worker/state_tier.h"

#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "runtime/base/log.h"
#include "services/worker/prefix_keeper.h"
#include "services/worker/prefix_teller.h"
#include "tests/unit/store/tier_fixture.h"

namespace deltamesh {
namespace {

using testing::RandomPrompt;
using testing::Result;
using testing::TestFolder;
using testing::TieredEngine;

class StateTierTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { InitLog("test", LogLevel::kError); }

  static std::vector<TokenId> Prompt(const std::vector<TokenId>& shared, int64_t of_shared,
                                     uint64_t seed, int64_t tail) {
    std::vector<TokenId> prompt(shared.begin(), shared.begin() + of_shared);
    const auto more = RandomPrompt(seed, tail, testing::kVocab);
    prompt.insert(prompt.end(), more.begin(), more.end());
    return prompt;
  }

  TestFolder folder_;
};

INSTANTIATE_TEST_SUITE_P(Families, StateTierTest,
                         ::testing::Values("kimi_k3_tiny", "kimi_linear_tiny"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(StateTierTest, EveryTailLengthFromDiskEqualsAColdRun) {
  const std::vector<TokenId> shared = RandomPrompt(1, 200, testing::kVocab);
  {
    TieredEngine t(GetParam(), folder_.path, nullptr);
    t.Run(shared);
    t.Settle(absl::Seconds(31));
    EXPECT_EQ(t.Metric("store_operations_total", "write"), 1);
  }
  TieredEngine t(GetParam(), folder_.path, nullptr);  // another process
  for (int64_t tail = 1; tail <= 64; ++tail) {
    t.cache->Clear();
    const auto prompt = Prompt(shared, 192, 100 + static_cast<uint64_t>(tail), tail);
    const Result warm = t.Run(prompt, 3);
    EXPECT_EQ(t.restored, 192) << tail;
    EXPECT_EQ(warm, t.Cold(prompt, 3)) << tail;
  }
  EXPECT_EQ(t.Metric("store_loads_total", "hit"), 64);
  t.cache->Clear();
  t.engine.ExpectBaseline();
}

TEST_P(StateTierTest, EveryTailLengthFromDiskInCompanyEqualsAColdRunAlone) {
  const std::vector<TokenId> shared = RandomPrompt(1, 200, testing::kVocab);
  TieredEngine t(GetParam(), folder_.path, nullptr);
  t.Run(shared);
  t.Settle(absl::Seconds(31));
  t.ExpectEveryTailInCompany({shared.begin(), shared.begin() + 192});
}

// From disk, from memory and cold ones side by side.
TEST_P(StateTierTest, LoadedSequencesInABatchEqualColdOnes) {
  const std::vector<TokenId> shared = RandomPrompt(7, 330, testing::kVocab);
  TieredEngine t(GetParam(), folder_.path, nullptr);
  t.Run({shared.begin(), shared.begin() + 200});
  t.Settle(absl::Seconds(31));
  t.Run(shared);
  t.Settle(absl::Seconds(31));
  t.cache->Clear();
  std::vector<std::vector<TokenId>> prompts;
  std::vector<SequenceId> ids;
  for (const int64_t tail : {1, 40, 64}) {
    for (const int64_t at : {192, 320}) {
      prompts.push_back(Prompt(shared, at, static_cast<uint64_t>(tail + at), tail));
      ids.push_back(t.Start(prompts.back()));
      EXPECT_EQ(t.restored, at);
      t.engine.Step();
    }
  }
  prompts.push_back(RandomPrompt(9, 77, testing::kVocab));
  ids.push_back(t.Start(prompts.back()));
  t.engine.RunAll();
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(t.engine.results[ids[i]], t.Cold(prompts[i])) << i;
  }
}

// A memory and a disk of a few states under random traffic: no wrong answer, no leak.
TEST_P(StateTierTest, EvictionOnBothTiersNeverChangesAnAnswer) {
  StateTierOptions options;
  options.write_after = absl::Seconds(2);
  TieredEngine probe(GetParam(), folder_.path + "/p", nullptr);
  const StateLayout layout = probe.engine.engine->pools().layout;
  const int64_t unit = layout.snapshot_bytes() + 4 * layout.block_bytes();
  TieredEngine t(GetParam(), folder_.path + "/t", nullptr, options, 3 * unit, 6 * unit);
  SeededEntropy random(98);
  std::vector<std::vector<TokenId>> known = {RandomPrompt(0, 70, testing::kVocab)};
  for (int turn = 0; turn < 30; ++turn) {
    std::vector<TokenId> prompt = known[random.Next() % known.size()];
    prompt = Prompt(prompt, static_cast<int64_t>(prompt.size()), random.Next(),
                    1 + static_cast<int64_t>(random.Next() % 90));
    if (prompt.size() > 260) prompt.resize(260);
    ASSERT_EQ(t.Run(prompt, 2), t.Cold(prompt, 2)) << turn;
    known.push_back(prompt);
    t.Settle(absl::Seconds(static_cast<double>(random.Next() % 4)));
    ASSERT_EQ(t.cache->tree().Check(), "");
  }
  EXPECT_GT(t.Metric("store_loads_total", "hit"), 2);
  EXPECT_GT(t.Metric("store_evicted_total", "disk"), 2);
  t.cache->Clear();
  t.engine.ExpectBaseline();
}

// Routers are told the union of memory and disk: never a block without the one before it, never a snapshot
// without its block, memory before disk, and in the end what is there.
TEST_P(StateTierTest, WhatIsToldHasNoGaps) {
  StateTierOptions options;
  options.write_after = absl::Seconds(2);
  TieredEngine probe(GetParam(), folder_.path + "/p", nullptr);
  const StateLayout layout = probe.engine.engine->pools().layout;
  const int64_t unit = layout.snapshot_bytes() + 4 * layout.block_bytes();
  TieredEngine t(GetParam(), folder_.path + "/t", nullptr, options, 3 * unit, 6 * unit);
  WorkerLinks links{mesh::Register()};
  links.Open(1);
  PrefixTeller teller(t.cache.get(), t.tier.get());
  teller.Begin(1);
  std::map<uint64_t, uint64_t> above;
  std::map<uint64_t, int> blocks, snapshots;  // 2: in memory, 1: cold
  const auto hear = [&] {
    teller.Tell(links);
    for (const SendToRouter& sent : links.Take()) {
      const mesh::PrefixChanges& changes = sent.message.prefixes();
      for (int i = 0; i < changes.keys_size(); ++i) {
        const uint64_t key = changes.keys(i);
        const auto what =
            static_cast<mesh::PrefixChanges::What>(changes.changes()[static_cast<size_t>(i)]);
        switch (what) {
          case mesh::PrefixChanges::LATENTS_ADDED:
            ASSERT_TRUE(blocks.emplace(key, 1).second);
            ASSERT_TRUE(!above.contains(key) || blocks.contains(above[key]));
            break;
          case mesh::PrefixChanges::LATENTS_DROPPED:
            ASSERT_EQ(blocks.erase(key), 1u);
            ASSERT_FALSE(snapshots.contains(key));
            for (const auto& [below, over] : above)
              ASSERT_FALSE(over == key && blocks.contains(below));
            break;
          case mesh::PrefixChanges::SNAPSHOT_DROPPED:
            ASSERT_EQ(snapshots.erase(key), 1u);
            break;
          default:
            ASSERT_TRUE(blocks.contains(key));
            snapshots[key] = what == mesh::PrefixChanges::SNAPSHOT_ADDED ? 2 : 1;
        }
      }
    }
  };
  SeededEntropy random(97);
  std::vector<std::vector<TokenId>> known = {RandomPrompt(0, 70, testing::kVocab)};
  size_t cold = 0;
  for (int turn = 0; turn < 60; ++turn) {
    std::vector<TokenId> prompt = known[random.Next() % known.size()];
    prompt = Prompt(prompt, static_cast<int64_t>(prompt.size()), random.Next(),
                    1 + static_cast<int64_t>(random.Next() % 90));
    if (prompt.size() > 260) prompt.resize(260);
    const auto path = TieredEngine::PathOf(prompt);
    for (size_t i = 1; i < path.size(); ++i) above[path[i].index()] = path[i - 1].index();
    t.Run(prompt, 1);
    known.push_back(prompt);
    t.Settle(absl::Seconds(static_cast<double>(random.Next() % 4)));
    hear();
    if (HasFatalFailure()) return;
    for (const auto& [key, state] : snapshots) cold += state == 1;
    int64_t hot = 0;
    for (const auto& [key, state] : snapshots) hot += state == 2;
    ASSERT_EQ(hot, t.cache->tree().stats().snapshots) << turn;
  }
  EXPECT_GT(cold, 20u);
  t.cache->Clear();
  hear();
  EXPECT_EQ(static_cast<double>(snapshots.size()), t.Metric("store_states", "disk"));
  // One who comes later is told the same.
  const auto told_blocks = blocks.size(), told_snapshots = snapshots.size();
  blocks.clear();
  snapshots.clear();
  above.clear();
  teller.Begin(1);
  hear();
  EXPECT_EQ(blocks.size(), told_blocks);
  EXPECT_EQ(snapshots.size(), told_snapshots);
}

TEST_P(StateTierTest, OnlyWhatRestsIsWrittenAndWhatWouldGoNext) {
  TieredEngine t(GetParam(), folder_.path, nullptr);
  const auto prompt = RandomPrompt(3, 200, testing::kVocab);
  t.Run(prompt);
  t.Settle(absl::Seconds(20));
  EXPECT_EQ(t.Metric("store_operations_total", "write"), 0);
  t.Run(prompt);  // used again: it does not rest
  t.Settle(absl::Seconds(20));
  EXPECT_EQ(t.Metric("store_operations_total", "write"), 0);
  // The session goes on: the older tail is not worth a file.
  t.Run(Prompt(prompt, 200, 4, 100));
  t.Settle(absl::Seconds(31));
  EXPECT_EQ(t.Metric("store_operations_total", "write"), 1);
  EXPECT_EQ(t.cache->tree().stats().snapshots, 2);

  const StateLayout layout = t.engine.engine->pools().layout;
  TieredEngine small(GetParam(), folder_.path + "/small", nullptr, {},
                     3 * (layout.snapshot_bytes() + 3 * layout.block_bytes()));
  for (uint64_t i = 0; i < 6; ++i) {
    small.Run(RandomPrompt(50 + i, 200, testing::kVocab));
    small.Settle(absl::Seconds(1));
  }
  EXPECT_GE(small.Metric("store_operations_total", "write"), 3);  // long before they rested
  for (uint64_t i = 0; i < 6; ++i) {
    small.Run(RandomPrompt(50 + i, 200, testing::kVocab));
    EXPECT_EQ(small.restored, 192) << i;
    small.Settle(absl::Seconds(1));
  }
}

TEST_P(StateTierTest, ReadingThatIsSlowerThanComputingIsLeft) {
  TieredEngine t(GetParam(), folder_.path, nullptr);
  const auto prompt = RandomPrompt(3, 200, testing::kVocab);
  const auto path = TieredEngine::PathOf(prompt);
  t.Run(prompt);
  t.Settle(absl::Seconds(31));
  t.cache->Clear();
  // Nothing has been read yet, so that is tried; then it is known.
  EXPECT_NE(t.tier->Load(path, 1e12, t.clock.now), nullptr);
  t.Settle();
  EXPECT_EQ(t.Metric("store_loads_total", "cancelled"), 1);  // nobody kept it
  EXPECT_EQ(t.cache->Find(path).snapshot.value(), 0);
  {
    const StateLoadRef load = t.tier->Load(path, 1e12, t.clock.now);
    ASSERT_NE(load, nullptr);
    EXPECT_EQ(t.tier->Load(path, 1e12, t.clock.now), load);  // one read for both
    t.Settle();
    EXPECT_TRUE(t.tier->Ended(load, t.clock.now));
  }
  EXPECT_EQ(t.cache->Find(path).snapshot.value(), 3);
  EXPECT_EQ(t.tier->Load(path, 0, t.clock.now), nullptr);  // memory has it
  t.cache->Clear();
  EXPECT_EQ(t.tier->Load(path, 1e12, t.clock.now), nullptr);
  EXPECT_EQ(t.Metric("store_loads_total", "slower"), 1);
  EXPECT_NE(t.tier->Load(path, 1, t.clock.now), nullptr);
}

// A store knows no tenants; a breakpoint that comes back from it counts as its reader's all the same.
TEST_P(StateTierTest, ABreakpointFromDiskIsItsTenants) {
  TieredEngine t(GetParam(), folder_.path, nullptr);
  PrefixKeeper keeper(t.cache.get(), t.tier.get(), mesh::ModelIdentity());
  mesh::CacheHints hints;
  hints.set_salt("tenant");
  hints.add_breakpoints(128);
  const auto run = [&](const std::vector<TokenId>& tokens, KeptPrompt* prompt) {
    keeper.SetTime(t.clock.now);
    keeper.Open(hints, tokens, 192, prompt);
    if (const StateLoadRef load = keeper.Load(*prompt, 0, t.clock.now)) {
      t.Settle();
      EXPECT_TRUE(keeper.Ended(load, t.clock.now));
    }
    SequenceSpec spec = TieredEngine::Watched(tokens, 1);
    CHECK_OK(keeper.Restore(prompt, &spec, t.clock.now));
    t.engine.Add(std::move(spec));
    t.engine.RunAll();
  };
  const auto shared = RandomPrompt(5, 200, testing::kVocab);
  KeptPrompt first, second;
  run(shared, &first);
  const int64_t charged = t.cache->tree().BreakpointBytes(first.chain->tenant());
  EXPECT_GT(charged, 0);
  t.Settle(absl::Seconds(31));
  t.cache->Clear();
  EXPECT_EQ(t.cache->tree().BreakpointBytes(first.chain->tenant()), 0);
  run(Prompt(shared, 128, 6, 72), &second);
  EXPECT_EQ(second.restored, 128);
  EXPECT_EQ(t.cache->tree().BreakpointBytes(first.chain->tenant()), charged);
}

TEST_P(StateTierTest, ALoadThatTakesTooLongIsNotWaitedFor) {
  TieredEngine t(GetParam(), folder_.path, nullptr);
  const auto prompt = RandomPrompt(3, 200, testing::kVocab);
  const auto path = TieredEngine::PathOf(prompt);
  t.Run(prompt);
  t.Settle(absl::Seconds(31));
  t.cache->Clear();
  StateLoadRef load = t.tier->Load(path, 0, t.clock.now);
  ASSERT_NE(load, nullptr);
  EXPECT_FALSE(t.tier->Ended(load, t.clock.now + absl::Seconds(29)));
  EXPECT_TRUE(t.tier->Ended(load, t.clock.now + absl::Seconds(31)));
  EXPECT_TRUE(t.tier->Ended(load, t.clock.now + absl::Seconds(32)));
  EXPECT_EQ(t.Metric("store_loads_total", "late"), 1);
  load = nullptr;
  t.Settle();
  t.engine.ExpectBaseline();
}

TEST_P(StateTierTest, SessionsGoDownAndComeBack) {
  const auto prompt = RandomPrompt(4, 330, testing::kVocab);
  const auto path = TieredEngine::PathOf(prompt);
  {
    TieredEngine t(GetParam(), folder_.path, nullptr);
    t.Run({prompt.begin(), prompt.begin() + 200});
    t.Run(prompt);
    EXPECT_EQ(t.cache->tree().stats().snapshots, 2);
    t.tier->Suspend(1, path);
    SessionStoreDone done = t.Done();
    EXPECT_TRUE(done.status.ok()) << done.status;
    EXPECT_EQ(done.blocks, 5);
    EXPECT_EQ(done.tier, "disk");
    EXPECT_EQ(t.cache->tree().stats().snapshots, 0);
    t.tier->Suspend(2, path);  // again
    done = t.Done();
    EXPECT_EQ(done.blocks, 5);
    EXPECT_EQ(done.bytes, 0u);
    t.tier->Suspend(3, TieredEngine::PathOf(RandomPrompt(5, 100, testing::kVocab)));
    done = t.Done();
    EXPECT_TRUE(done.status.ok());
    EXPECT_EQ(done.blocks, 0);
    t.tier->PutRecord(4, "session", "content");
    EXPECT_EQ(t.Done().tier, "disk");
    t.tier->PutRecord(5, "", "content");
    EXPECT_EQ(t.Done().status.code(), absl::StatusCode::kInvalidArgument);
    t.engine.ExpectBaseline();
  }
  TieredEngine t(GetParam(), folder_.path, nullptr);
  t.tier->GetRecord(6, "session");
  EXPECT_EQ(t.Done().content, "content");
  t.tier->Load(7, path);
  EXPECT_EQ(t.Done().blocks, 5);
  EXPECT_EQ(t.cache->Find(path).snapshot.value(), 5);
  EXPECT_EQ(t.Run(prompt), t.Cold(prompt));
  EXPECT_EQ(t.restored, 320);
}

TEST(IoQueueTest, UrgentWorkGoesFirstAndRoomIsBounded) {
  IoQueue queue(100, false, nullptr);
  std::vector<int> order;
  const auto work = [&](int i) {
    return [&order, i]() -> IoQueue::Finish {
      order.push_back(i);
      return [&order, i] { order.push_back(10 + i); };
    };
  };
  EXPECT_TRUE(queue.Push(500, work(1)));  // alone, it may be larger
  EXPECT_FALSE(queue.Push(1, work(2)));
  queue.PushUrgent(50, work(3));
  EXPECT_EQ(queue.bytes(), 550);
  while (queue.RunOne()) {
  }
  EXPECT_FALSE(queue.idle());
  for (auto& finish : queue.TakeFinished()) finish();
  EXPECT_EQ(order, (std::vector<int>{3, 1, 13, 11}));
  EXPECT_TRUE(queue.idle());
  EXPECT_EQ(queue.bytes(), 0);
}

TEST(IoQueueTest, AThreadDoesTheWorkAndEndsWithIt) {
  std::atomic<int> notified = 0, done = 0;
  {
    IoQueue queue(1 << 20, true, [&] { ++notified; });
    for (int i = 0; i < 20; ++i) {
      queue.Push(1, [&]() -> IoQueue::Finish {
        ++done;
        return [] {};
      });
    }
    while (notified < 20) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_EQ(queue.TakeFinished().size(), 20u);
    queue.Push(1, [&queue]() -> IoQueue::Finish {
      while (!queue.stopping()) absl::SleepFor(absl::Milliseconds(1));
      return [] {};
    });
    absl::SleepFor(absl::Milliseconds(5));
    queue.Push(1, [&]() -> IoQueue::Finish {
      ++done;
      return [] {};
    });
  }
  EXPECT_EQ(done, 20);  // what waited was dropped
}

}  // namespace
}  // namespace deltamesh

#include "services/router/prefix_index.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "runtime/base/random.h"

namespace deltamesh {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<uint64_t> Keys(uint64_t seed, int64_t count) {
  SeededEntropy random(seed);
  std::vector<uint64_t> keys;
  for (int64_t i = 0; i < count; ++i) keys.push_back(random.Next());
  return keys;
}

void Add(PrefixIndex& index, WorkerSlot worker, const std::vector<uint64_t>& keys, int64_t blocks,
         std::vector<int64_t> snapshots) {
  std::vector<IndexChange> changes;
  for (int64_t i = 0; i < blocks; ++i) {
    changes.push_back({IndexChange::kLatentsAdded, keys[static_cast<size_t>(i)]});
  }
  for (const int64_t s : snapshots) {
    changes.push_back({IndexChange::kSnapshotAdded, keys[static_cast<size_t>(s - 1)]});
  }
  index.Apply(worker, changes);
}

TEST(PrefixIndex, TheTwoFactsOfEveryWorker) {
  PrefixIndex index;
  const WorkerSlot a = index.AddWorker(), b = index.AddWorker(), c = index.AddWorker();
  const auto keys = Keys(1, 10);
  Add(index, a, keys, 10, {3, 8});
  Add(index, b, keys, 5, {});
  Add(index, c, keys, 10, {10});
  index.Trust(a);
  index.Trust(b);
  EXPECT_THAT(index.Find(keys), ElementsAre(IndexMatch{.worker = a,
                                                       .latents = LatentBlocks(10),
                                                       .snapshot = SnapshotBlocks(8),
                                                       .warm = SnapshotBlocks(8)},
                                            IndexMatch{.worker = b,
                                                       .latents = LatentBlocks(5),
                                                       .snapshot = SnapshotBlocks(0)}))
      << "the third is not trusted yet";
  index.Trust(c);
  EXPECT_EQ(index.Find(keys).size(), 3u);
  EXPECT_THAT(index.Find(std::span(keys).first(7)).front(),
              (IndexMatch{.worker = a,
                          .latents = LatentBlocks(7),
                          .snapshot = SnapshotBlocks(3),
                          .warm = SnapshotBlocks(3)}));
  EXPECT_THAT(index.Find(Keys(2, 10)), IsEmpty());
}

TEST(PrefixIndex, ASnapshotBeyondTheLatentsDoesNotCount) {
  PrefixIndex index;
  const WorkerSlot a = index.AddWorker();
  index.Trust(a);
  const auto keys = Keys(1, 10);
  Add(index, a, keys, 5, {2, 9});
  EXPECT_THAT(index.Find(keys), ElementsAre(IndexMatch{.worker = a,
                                                       .latents = LatentBlocks(5),
                                                       .snapshot = SnapshotBlocks(2),
                                                       .warm = SnapshotBlocks(2)}));
  EXPECT_THAT(index.Find({}), IsEmpty());
}

// A deeper snapshot on disk hides none in memory, and one that went to disk is not taken for warm.
TEST(PrefixIndex, TheDeepestInMemoryIsKnownBelowADeeperOneOnDisk) {
  PrefixIndex index;
  const WorkerSlot a = index.AddWorker();
  index.Trust(a);
  const auto keys = Keys(1, 10);
  Add(index, a, keys, 10, {2, 5, 9});
  const auto match = [&](size_t blocks) {
    return index.Find(std::span(keys).first(blocks)).front();
  };
  index.Apply(a, std::vector<IndexChange>{{IndexChange::kSnapshotCold, keys[8]}});
  EXPECT_EQ(match(10), (IndexMatch{.worker = a,
                                   .latents = LatentBlocks(10),
                                   .snapshot = SnapshotBlocks(9),
                                   .warm = SnapshotBlocks(5)}));
  EXPECT_TRUE(match(10).cold());
  EXPECT_FALSE(match(8).cold());
  index.Apply(a, std::vector<IndexChange>{{IndexChange::kSnapshotCold, keys[4]}});
  EXPECT_EQ(match(10), (IndexMatch{.worker = a,
                                   .latents = LatentBlocks(10),
                                   .snapshot = SnapshotBlocks(9),
                                   .warm = SnapshotBlocks(2)}));
  index.Apply(a, std::vector<IndexChange>{{IndexChange::kSnapshotAdded, keys[8]}});
  EXPECT_EQ(match(10), (IndexMatch{.worker = a,
                                   .latents = LatentBlocks(10),
                                   .snapshot = SnapshotBlocks(9),
                                   .warm = SnapshotBlocks(9)}));
}

// A state in an object store has its latents with it: it counts where the worker itself has none, and past
// the end of those that it has.
TEST(PrefixIndex, AStateInAnObjectStoreNeedsNoLatentsAtTheWorker) {
  PrefixIndex index;
  const WorkerSlot a = index.AddWorker(), b = index.AddWorker();
  index.Trust(a);
  const auto keys = Keys(1, 10);
  Add(index, a, keys, 5, {4});
  const std::vector<IndexChange> states = {{IndexChange::kObjectAdded, keys[2]},
                                           {IndexChange::kObjectAdded, keys[7]}};
  index.Apply(a, states);
  index.Apply(b, states);
  const IndexMatch of_a = {.worker = a,
                           .latents = LatentBlocks(5),
                           .snapshot = SnapshotBlocks(4),
                           .warm = SnapshotBlocks(4),
                           .object = SnapshotBlocks(8)};
  EXPECT_THAT(index.Find(keys), ElementsAre(of_a)) << "the other is not trusted yet";
  EXPECT_FALSE(of_a.cold());
  EXPECT_EQ(of_a.reachable(), SnapshotBlocks(8));
  index.Trust(b);
  EXPECT_THAT(index.Find(keys),
              ElementsAre(of_a, IndexMatch{.worker = b, .object = SnapshotBlocks(8)}));
  EXPECT_EQ(index.Find(std::span(keys).first(7)).back().object, SnapshotBlocks(3));
  index.Apply(b, std::vector<IndexChange>{{IndexChange::kObjectDropped, keys[7]}});
  EXPECT_EQ(index.Find(keys).back().object, SnapshotBlocks(3));
  index.Apply(b, std::vector<IndexChange>{{IndexChange::kObjectDropped, keys[2]}});
  EXPECT_THAT(index.Find(keys), ElementsAre(of_a));
  index.RemoveWorker(a);
  EXPECT_THAT(index.Find(keys), IsEmpty());
}

TEST(PrefixIndex, ARemovedWorkerIsForgottenAtOnceAndItsPlaceIsCleanWhenGivenAgain) {
  PrefixIndex index;
  std::vector<WorkerSlot> workers;
  for (int i = 0; i < 64; ++i) workers.push_back(index.AddWorker());
  const auto keys = Keys(1, 300);
  for (const WorkerSlot w : workers) {
    Add(index, w, keys, 300, {300});
    index.Trust(w);
  }
  index.RemoveWorker(workers[7]);
  EXPECT_EQ(index.Find(keys).size(), 63u);
  const WorkerSlot next = index.AddWorker();
  EXPECT_EQ(next, 64) << "the place is not clean yet, so another group begins";
  while (index.Sweep()) {
  }
  const WorkerSlot again = index.AddWorker();
  EXPECT_EQ(again, workers[7]);
  index.Trust(again);
  EXPECT_EQ(index.Find(keys).size(), 63u) << "it has nothing yet";
}

TEST(PrefixIndex, AFullIndexDropsWhatIsNewAndKeepsWhatItHas) {
  PrefixIndex index({.entries_max = 100});
  const WorkerSlot a = index.AddWorker();
  index.Trust(a);
  const auto keys = Keys(1, 150);
  Add(index, a, keys, 150, {});
  EXPECT_EQ(index.entries(), 100);
  EXPECT_EQ(index.dropped(), 50u);
  EXPECT_EQ(index.Find(keys).front().latents.value(), 100);
  Add(index, a, keys, 100, {100});  // facts of known keys find room
  EXPECT_EQ(index.Find(keys).front().snapshot.value(), 100);
}

// Random traffic of many workers against sets.
TEST(PrefixIndex, EqualsABruteForceTwin) {
  struct Facts {
    std::set<uint64_t> latents, snapshots, cold, objects;
    bool trusted = false;
  };
  SeededEntropy random(5);
  const auto below = [&](size_t n) { return static_cast<size_t>(random.Next() % n); };
  std::vector<std::vector<uint64_t>> prompts;
  for (uint64_t p = 0; p < 30; ++p) {
    std::vector<uint64_t> keys = Keys(p, 60);
    if (p > 5) {  // most share a beginning with another one
      const auto& other = prompts[below(prompts.size())];
      std::copy_n(other.begin(), below(60), keys.begin());
    }
    prompts.push_back(keys);
  }
  PrefixIndex index;
  std::map<WorkerSlot, Facts> twin;
  int hidden = 0, cold_only = 0, object_only = 0, deeper_object = 0;
  for (int step = 0; step < 3000; ++step) {
    if (twin.size() < 100 && below(20) == 0) twin[index.AddWorker()];
    if (twin.empty()) continue;
    auto worker = std::next(twin.begin(), static_cast<ptrdiff_t>(below(twin.size())));
    Facts& facts = worker->second;
    const auto& prompt = prompts[below(prompts.size())];
    if (below(100) == 0) {
      index.RemoveWorker(worker->first);
      twin.erase(worker);
      continue;
    }
    if (below(10) == 0) {
      index.Trust(worker->first);
      facts.trusted = true;
    }
    std::vector<IndexChange> changes;
    const size_t depth = below(61);  // it has the first `depth` blocks afterwards
    for (size_t n = 0; n < depth; ++n) {
      if (below(2) == 0 || !facts.latents.contains(prompt[n])) {
        changes.push_back({IndexChange::kLatentsAdded, prompt[n]});
        facts.latents.insert(prompt[n]);
      }
    }
    const bool shared = std::any_of(prompts.begin(), prompts.end(), [&](const auto& other) {
      return &other != &prompt && depth < 60 && other[0] == prompt[0];
    });
    for (size_t n = 60; !shared && n-- > depth;) {  // leaf first
      changes.push_back({IndexChange::kLatentsDropped, prompt[n]});
      facts.latents.erase(prompt[n]);
    }
    for (size_t n = below(10); n-- > 0;) {
      const uint64_t key = prompt[below(60)];
      const auto what = static_cast<IndexChange::What>(2 + below(3));
      changes.push_back({what, key});
      if (what == IndexChange::kSnapshotDropped) {
        facts.snapshots.erase(key);
      } else {
        facts.snapshots.insert(key);
      }
      if (what == IndexChange::kSnapshotCold) {
        facts.cold.insert(key);
      } else {
        facts.cold.erase(key);
      }
    }
    for (size_t n = below(3); n-- > 0;) {
      const uint64_t key = prompt[below(60)];
      const bool added = below(3) != 0;
      changes.push_back({added ? IndexChange::kObjectAdded : IndexChange::kObjectDropped, key});
      added ? (void)facts.objects.insert(key) : (void)facts.objects.erase(key);
    }
    index.Apply(worker->first, changes);
    index.Sweep();

    std::vector<IndexMatch> expected;
    for (const auto& [slot, f] : twin) {
      IndexMatch match = {.worker = slot};
      for (size_t i = 0; i < prompt.size() && f.latents.contains(prompt[i]); ++i) {
        match.latents = LatentBlocks(static_cast<int64_t>(i + 1));
        if (!f.snapshots.contains(prompt[i])) continue;
        match.snapshot = SnapshotBlocks(match.latents.value());
        if (!f.cold.contains(prompt[i])) match.warm = match.snapshot;
      }
      for (size_t i = 0; i < prompt.size(); ++i) {
        if (f.objects.contains(prompt[i]))
          match.object = SnapshotBlocks(static_cast<int64_t>(i + 1));
      }
      const bool any = match.latents.value() + match.object.value() > 0;
      if (f.trusted && any) expected.push_back(match);
    }
    ASSERT_EQ(index.Find(prompt), expected) << step;
    for (const IndexMatch& match : expected) {
      hidden += match.warm.value() > 0 && match.cold();
      cold_only += match.warm.value() == 0 && match.cold();
      object_only += match.latents.value() == 0;
      deeper_object += match.object > match.snapshot && match.snapshot.value() > 0;
    }
  }
  EXPECT_GT(hidden, 100);
  EXPECT_GT(cold_only, 100);
  EXPECT_GT(object_only, 40);
  EXPECT_GT(deeper_object, 100);
  EXPECT_GT(twin.size(), 64u);
}

// An entry dies with its last bit, and memory follows.
TEST(PrefixIndex, MemoryIsFlatUnderChurn) {
  PrefixIndex index;
  const WorkerSlot a = index.AddWorker();
  int64_t most = 0;
  for (uint64_t round = 0; round < 200; ++round) {
    const auto keys = Keys(round, 2000);
    std::vector<IndexChange> changes;
    for (const uint64_t key : keys) changes.push_back({IndexChange::kLatentsAdded, key});
    if (round >= 5) {
      for (const uint64_t key : Keys(round - 5, 2000)) {
        changes.push_back({IndexChange::kLatentsDropped, key});
      }
    }
    index.Apply(a, changes);
    ASSERT_EQ(index.entries(), static_cast<int64_t>(std::min<uint64_t>(round + 1, 5) * 2000));
    if (round == 20) most = index.bytes();
    if (round > 20) {
      ASSERT_LE(index.bytes(), most * 5 / 4) << round;
    }
  }
  index.RemoveWorker(a);
  while (index.Sweep()) {
  }
  EXPECT_EQ(index.entries(), 0);
  EXPECT_LT(index.bytes(), 300000);
}

}  // namespace
}  // namespace deltamesh

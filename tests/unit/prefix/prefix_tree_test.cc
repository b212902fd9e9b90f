#include "runtime/prefix/prefix_tree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <concepts>
#include <cstring>
#include <map>
#include <set>
#include <type_traits>

#include "runtime/base/random.h"

namespace deltamesh {
namespace {

using Path = std::vector<PrefixKey>;

// Keys without hashing: the words a path is made of, folded.
Path MakePath(const std::vector<int>& words) {
  Path path;
  uint64_t h = 1;
  for (const int word : words) {
    h = SeededEntropy(h ^ static_cast<uint64_t>(word) << 40).Next();
    PrefixKey key;
    std::memcpy(key.bytes.data(), &h, 8);
    path.push_back(key);
  }
  return path;
}

std::vector<int> Words(int first, int count) {
  std::vector<int> words;
  for (int i = 0; i < count; ++i) words.push_back(first * 1000 + i);
  return words;
}

Path Along(std::vector<int> words, const std::vector<int>& more) {
  words.insert(words.end(), more.begin(), more.end());
  return MakePath(words);
}

absl::Time At(int64_t second) { return absl::FromUnixSeconds(1000000 + second); }

PrefixTreeOptions Sizes(int64_t bytes_max) {
  PrefixTreeOptions options;
  options.bytes_max = bytes_max;
  options.block_bytes = 1;
  options.snapshot_bytes = 10;
  return options;
}

// Inserts with payloads numbered on.
class Filler {
 public:
  explicit Filler(PrefixTree* tree) : tree_(tree) {}
  bool Put(const Path& path, int64_t blocks, SnapshotKind kind, int64_t second,
           uint64_t session = 0, uint64_t tenant = 0) {
    std::vector<uint64_t> ids(static_cast<size_t>(blocks));
    for (uint64_t& id : ids) id = ++next_;
    return tree_->Insert(path, ids, ++next_,
                         {.blocks = blocks, .kind = kind, .session = session, .tenant = tenant},
                         At(second));
  }
  uint64_t next() const { return next_; }

 private:
  PrefixTree* tree_;
  uint64_t next_ = 0;
};

constexpr SnapshotKind kTail = SnapshotKind::kPromptTail;
constexpr SnapshotKind kEnd = SnapshotKind::kAnswerEnd;

// How far latents are held says nothing of where a snapshot stands: neither is the other, nor a number.
static_assert(!std::is_convertible_v<LatentBlocks, SnapshotBlocks>);
static_assert(!std::is_assignable_v<SnapshotBlocks&, LatentBlocks>);
static_assert(!std::is_assignable_v<LatentBlocks&, SnapshotBlocks>);
static_assert(!std::is_assignable_v<LatentBlocks&, int64_t>);
static_assert(!std::is_convertible_v<SnapshotBlocks, int64_t>);
static_assert(!std::equality_comparable_with<LatentBlocks, SnapshotBlocks>);
static_assert(sizeof(LatentBlocks) == sizeof(int64_t));

TEST(PrefixTree, LatentsAndSnapshotsAreTwoFacts) {
  PrefixTree tree(Sizes(1000));
  Filler filler(&tree);
  const Path path = MakePath(Words(1, 10));
  EXPECT_EQ(tree.Find(path), PrefixMatch{});
  ASSERT_TRUE(filler.Put(path, 8, kTail, 0));
  EXPECT_EQ(tree.Find(path),
            (PrefixMatch{.latents = LatentBlocks(8), .snapshot = SnapshotBlocks(8)}));
  const Path other = Along(Words(1, 5), Words(2, 5));
  EXPECT_EQ(tree.Find(other),
            (PrefixMatch{.latents = LatentBlocks(5), .snapshot = SnapshotBlocks(0)}));
  EXPECT_TRUE(tree.HasChildren(other[4]));
  ASSERT_TRUE(filler.Put(other, 5, SnapshotKind::kJunction, 1));
  EXPECT_EQ(tree.Find(other),
            (PrefixMatch{.latents = LatentBlocks(5), .snapshot = SnapshotBlocks(5)}));
  EXPECT_EQ(tree.bytes(), 8 + 2 * 10);
  EXPECT_EQ(tree.Find(std::span(path).first(7)),
            (PrefixMatch{.latents = LatentBlocks(7), .snapshot = SnapshotBlocks(5)}));
  EXPECT_EQ(tree.Check(), "");
}

TEST(PrefixTree, WhatIsThereIsKeptAndItsNewPayloadsAreNotTaken) {
  PrefixTree tree(Sizes(1000));
  Filler filler(&tree);
  const Path path = MakePath(Words(1, 4));
  filler.Put(path, 4, kTail, 0);
  EXPECT_EQ(tree.TakeChanges().size(), 5u);
  const std::vector<uint64_t> ids = tree.BlockIds(path, 4);
  filler.Put(path, 4, kTail, 1);
  EXPECT_TRUE(tree.TakeChanges().empty());
  EXPECT_EQ(tree.BlockIds(path, 4), ids);
  const Path longer = MakePath(Words(1, 6));
  filler.Put(longer, 6, kTail, 2);
  const std::vector<PrefixChange> changes = tree.TakeChanges();
  ASSERT_EQ(changes.size(), 3u);  // two blocks, one snapshot
  EXPECT_EQ(changes[0].what, PrefixChange::kBlockAdded);
  EXPECT_EQ(changes[0].blocks, 5);
  EXPECT_EQ(changes[2].what, PrefixChange::kSnapshotAdded);
  EXPECT_EQ(tree.SnapshotId(longer[5]), filler.next());
}

TEST(PrefixTree, OnlyTheNewestTailsAndEndOfASessionStay) {
  for (const uint64_t session : {uint64_t{0}, uint64_t{77}}) {
    PrefixTree tree(Sizes(100000));
    Filler filler(&tree);
    const Path path = MakePath(Words(1, 100));
    for (int turn = 1; turn <= 9; ++turn) {
      filler.Put(path, turn * 10, kTail, turn, session);
      filler.Put(path, turn * 10 + 5, kEnd, turn, session);
      ASSERT_EQ(tree.Check(), "");
    }
    EXPECT_EQ(tree.stats().snapshots, 3) << session;
    for (const int stays : {80, 90, 95}) EXPECT_TRUE(tree.HasSnapshot(path[stays - 1])) << stays;
    EXPECT_EQ(tree.Find(path).latents.value(), 95);
    EXPECT_EQ(tree.stats().superseded, 15u);
  }
}

// Agents of one session, users of one key: each talks about its own things.
TEST(PrefixTree, TailsOnOtherPathsOfASessionAreLeftAlone) {
  PrefixTree tree(Sizes(100000));
  Filler filler(&tree);
  const Path main = MakePath(Words(1, 60));
  filler.Put(main, 20, kTail, 1, 5);
  for (int side = 2; side < 6; ++side)
    filler.Put(Along(Words(1, 4), Words(side, 20)), 24, kTail, side, 5);
  EXPECT_EQ(tree.Find(main).snapshot.value(), 20);
  filler.Put(main, 30, kTail, 7, 6);  // another session goes on from there
  EXPECT_TRUE(tree.HasSnapshot(main[19]));
  EXPECT_EQ(tree.Check(), "");
}

// A compacted session leaves its old path; agents that share a name come back to theirs.
TEST(PrefixTree, WhatASessionLeftGoesAfterEnoughTurnsElsewhere) {
  PrefixTreeOptions options = Sizes(100000);
  options.left_kept = 6;
  PrefixTree tree(options);
  Filler filler(&tree);
  const Path left = Along(Words(1, 4), Words(2, 20)), other = Along(Words(1, 4), Words(3, 60));
  filler.Put(left, 24, kTail, 0, 5);
  const Path agents[] = {Along(Words(1, 4), Words(4, 60)), Along(Words(1, 4), Words(5, 60))};
  for (int turn = 1; turn <= 6; ++turn) {
    EXPECT_TRUE(tree.HasSnapshot(left[23])) << turn;
    filler.Put(other, 8 * turn, kTail, turn, 5);
  }
  filler.Put(other, 59, kEnd, 8, 5);
  EXPECT_FALSE(tree.HasSnapshot(left[23]));
  EXPECT_EQ(tree.Find(left).latents.value(), 4);
  for (int turn = 1; turn <= 9; ++turn) {  // in turns, both stay
    for (const Path& agent : agents) {
      if (turn > 1) tree.Touch(agent[static_cast<size_t>(6 * turn - 7)], At(10 + turn));
      filler.Put(agent, 6 * turn, kTail, 10 + turn, 6);
    }
  }
  for (const Path& agent : agents) EXPECT_EQ(tree.Find(agent).snapshot.value(), 54);
  filler.Put(left, 24, kTail, 30, 0);  // unnamed ones are no session's
  for (int turn = 0; turn < 20; ++turn) filler.Put(MakePath(Words(50 + turn, 3)), 3, kTail, 31, 0);
  EXPECT_TRUE(tree.HasSnapshot(left[23]));
  EXPECT_EQ(tree.Check(), "");
}

// Ends of answers are never continued here, junctions always: the order turns round.
TEST(PrefixTree, LearnsWhichKindsAreVisited) {
  PrefixTree tree(Sizes(600));
  Filler filler(&tree);
  for (int i = 0; i < 400; ++i) {
    filler.Put(MakePath(Words(1000 + i, 10)), 10, kEnd, i);
    const Path junction = MakePath(Words(2000 + i, 10));
    filler.Put(junction, 10, SnapshotKind::kJunction, i);
    tree.Touch(junction[9], At(i));
  }
  ASSERT_EQ(tree.Check(), "");
  int ends = 0, junctions = 0;
  for (int i = 0; i < 400; ++i) {
    ends += tree.HasSnapshot(MakePath(Words(1000 + i, 10))[9]);
    junctions += tree.HasSnapshot(MakePath(Words(2000 + i, 10))[9]);
  }
  EXPECT_LT(ends, 5);
  EXPECT_GT(junctions, 25);
}

TEST(PrefixTree, WhatWasComputedAgainIsNotReplacedByItsOwnInsertion) {
  PrefixTree tree(Sizes(100000));
  Filler filler(&tree);
  const Path path = MakePath(Words(1, 60));
  filler.Put(path, 20, kTail, 1, 5);
  filler.Put(path, 40, kEnd, 2, 5);
  filler.Put(path, 20, kEnd, 3, 5);
  EXPECT_TRUE(tree.HasSnapshot(path[19]));
}

TEST(PrefixTree, ATailWherePromptsPartStays) {
  PrefixTree tree(Sizes(100000));
  Filler filler(&tree);
  const std::vector<int> shared = Words(1, 10);
  filler.Put(MakePath(shared), 10, kTail, 0);
  filler.Put(Along(shared, Words(2, 5)), 15, kTail, 1);
  filler.Put(Along(shared, Words(3, 5)), 15, kTail, 2);
  filler.Put(Along(shared, Words(2, 9)), 19, kTail, 3);
  filler.Put(Along(shared, Words(2, 14)), 24, kTail, 4);
  EXPECT_TRUE(tree.HasSnapshot(MakePath(shared)[9]));
  EXPECT_EQ(tree.Check(), "");
}

TEST(PrefixTree, EvictionFreesTheLeastRecentOfEqualSessions) {
  PrefixTree tree(Sizes(3 * 30));
  Filler filler(&tree);
  for (int s = 0; s < 3; ++s) filler.Put(MakePath(Words(s, 20)), 20, kTail, s);
  tree.Touch(MakePath(Words(0, 20))[19], At(10));
  filler.Put(MakePath(Words(9, 20)), 20, kTail, 11);
  EXPECT_EQ(tree.Find(MakePath(Words(1, 20))), PrefixMatch{});  // latents went with it
  for (const int s : {0, 2, 9})
    EXPECT_EQ(tree.Find(MakePath(Words(s, 20))).snapshot.value(), 20) << s;
  EXPECT_EQ(tree.stats().evicted, 1u);
  EXPECT_EQ(tree.Check(), "");
}

TEST(PrefixTree, ALongPrefixIsWorthMoreThanAShortOne) {
  PrefixTree tree(Sizes(15 + 50));
  Filler filler(&tree);
  filler.Put(MakePath(Words(1, 40)), 40, kTail, 0);
  filler.Put(MakePath(Words(2, 5)), 5, kTail, 1);
  filler.Put(MakePath(Words(3, 5)), 5, kTail, 2);
  EXPECT_EQ(tree.Find(MakePath(Words(1, 40))).snapshot.value(), 40);
  EXPECT_EQ(tree.Find(MakePath(Words(2, 5))).latents.value(), 0);
}

TEST(PrefixTree, APassedTailGoesBeforeAnyNewestOne) {
  PrefixTree tree(Sizes(30 + 10 + 30 + 9));
  Filler filler(&tree);
  const Path one = MakePath(Words(1, 20));
  filler.Put(one, 10, kTail, 100);
  filler.Put(one, 20, kTail, 101);                   // passes the first
  filler.Put(MakePath(Words(2, 20)), 20, kTail, 0);  // older, but nobody went on from it
  filler.Put(MakePath(Words(3, 2)), 2, kTail, 102);
  EXPECT_FALSE(tree.HasSnapshot(one[9]));
  EXPECT_EQ(tree.Find(one),
            (PrefixMatch{.latents = LatentBlocks(20), .snapshot = SnapshotBlocks(20)}));
  EXPECT_EQ(tree.Find(MakePath(Words(2, 20))).snapshot.value(), 20);
}

TEST(PrefixTree, WhatCanNeverFitIsNotTaken) {
  PrefixTree tree(Sizes(25));
  Filler filler(&tree);
  filler.Put(MakePath(Words(1, 10)), 10, kTail, 0);
  EXPECT_FALSE(filler.Put(MakePath(Words(2, 16)), 16, kTail, 1));
  EXPECT_EQ(tree.stats().snapshots, 1);
  EXPECT_TRUE(filler.Put(MakePath(Words(2, 15)), 15, kTail, 2));
  EXPECT_EQ(tree.stats().snapshots, 1);
  tree.Clear();
  EXPECT_EQ(tree.bytes(), 0);
  EXPECT_FALSE(tree.EvictOne());
}

// Random traffic against sets kept from the changes alone.
TEST(PrefixTree, ChangesTellEverything) {
  for (const uint64_t seed : {1u, 2u, 3u}) {
    SeededEntropy random(seed);
    const auto below = [&](uint64_t n) { return static_cast<int>(random.Next() % n); };
    PrefixTree tree(Sizes(400));
    Filler filler(&tree);
    std::map<PrefixKey, uint64_t> blocks, snapshots;
    std::vector<std::vector<int>> prompts = {Words(1, 3), Words(2, 3)};
    for (int step = 0; step < 3000; ++step) {
      std::vector<int> words = prompts[static_cast<size_t>(below(prompts.size()))];
      if (below(3) == 0 || words.size() > 40) {
        words.resize(static_cast<size_t>(1 + below(words.size())));
      }
      for (int n = below(12); n > 0; --n) words.push_back(below(5));
      const Path path = MakePath(words);
      const PrefixMatch match = tree.Find(path);
      if (match.snapshot.value() > 0)
        tree.Touch(path[static_cast<size_t>(match.snapshot.value() - 1)], At(step));
      if (below(20) == 0) tree.EvictOne();
      filler.Put(path, static_cast<int64_t>(path.size()),
                 below(2) == 0 ? kTail : static_cast<SnapshotKind>(below(5)), step,
                 static_cast<uint64_t>(below(2)));
      prompts.push_back(words);
      for (const PrefixChange& c : tree.TakeChanges()) {
        auto& held = c.what <= PrefixChange::kBlockDropped ? blocks : snapshots;
        if (c.what == PrefixChange::kBlockAdded || c.what == PrefixChange::kSnapshotAdded) {
          ASSERT_TRUE(held.emplace(c.key, c.id).second);
        } else {
          const auto found = held.find(c.key);
          ASSERT_TRUE(found != held.end() && found->second == c.id);
          held.erase(found);
        }
      }
      ASSERT_EQ(tree.Check(), "") << step;
      ASSERT_EQ(static_cast<int64_t>(blocks.size() + 10 * snapshots.size()), tree.bytes());
      PrefixMatch twin;
      for (size_t i = 0; i < path.size() && blocks.contains(path[i]); ++i) {
        twin.latents = LatentBlocks(static_cast<int64_t>(i + 1));
        if (snapshots.contains(path[i])) twin.snapshot = SnapshotBlocks(twin.latents.value());
      }
      ASSERT_EQ(tree.Find(path), twin);
      ASSERT_EQ(twin.snapshot.value(), static_cast<int64_t>(path.size()));
    }
    EXPECT_GT(tree.stats().evicted, 100u);
    EXPECT_GT(tree.stats().superseded, 5u);
  }
}

// A tenant that marks ever more places pushes out its own ones once it has its share, nobody else's, though
// those are older and worth less. Without the bound the others would be gone.
TEST(PrefixTree, ATenantsBreakpointsPushOutItsOwn) {
  for (const double share : {0.5, 1.0}) {
    PrefixTreeOptions options = Sizes(40 * 20);
    options.breakpoint_share = share;
    PrefixTree tree(options);
    Filler filler(&tree);
    std::vector<Path> others;
    for (int i = 0; i < 10; ++i) {  // 20 bytes each
      others.push_back(MakePath(Words(i, 10)));
      ASSERT_TRUE(filler.Put(others.back(), 10, kTail, i, 0, 7));
    }
    std::vector<Path> own;
    for (int i = 0; i < 200; ++i) {
      own.push_back(MakePath(Words(100 + i, 10)));
      ASSERT_TRUE(filler.Put(own.back(), 10, SnapshotKind::kBreakpoint, 100 + i, 0, 8));
      ASSERT_EQ(tree.Check(), "");
    }
    int kept = 0;
    for (const Path& path : others) kept += tree.HasSnapshot(path.back());
    EXPECT_TRUE(tree.HasSnapshot(own.back().back())) << "the newest is never the one that goes";
    if (share == 0.5) {
      EXPECT_EQ(kept, 10);
      EXPECT_EQ(tree.BreakpointBytes(8), 30 * 20) << "what the others left";
      EXPECT_GT(tree.stats().over_share, 50u);
    } else {
      EXPECT_EQ(kept, 0);
      EXPECT_EQ(tree.stats().over_share, 0u);
    }
    EXPECT_EQ(tree.BreakpointBytes(7), 0);
    // What is given back for latents goes the same way.
    while (tree.BreakpointBytes(8) > 20 * 20) ASSERT_TRUE(tree.EvictOne());
    for (const Path& path : others) EXPECT_EQ(tree.HasSnapshot(path.back()), share == 0.5);
    tree.Clear();
    EXPECT_EQ(tree.BreakpointBytes(8), 0);
    EXPECT_EQ(tree.Check(), "");
  }
}

// Alone, a tenant has all of it: what goes is what would go without the bound.
TEST(PrefixTree, TheShareDoesNotBindATenantThatIsAlone) {
  PrefixTreeOptions options = Sizes(500);
  options.breakpoint_share = 0;
  PrefixTree bound(options), free(Sizes(500));
  Filler a(&bound), b(&free);
  SeededEntropy entropy(3);
  for (int i = 0; i < 300; ++i) {
    const Path path = MakePath(Words(static_cast<int>(entropy.Next() % 40), 12));
    const auto blocks = static_cast<int64_t>(1 + entropy.Next() % 12);
    const SnapshotKind kind = entropy.Next() % 2 == 0 ? kTail : SnapshotKind::kBreakpoint;
    a.Put(path, blocks, kind, i, 0, 5);
    b.Put(path, blocks, kind, i, 0, 5);
    ASSERT_EQ(bound.Find(path), free.Find(path)) << i;
    ASSERT_EQ(bound.bytes(), free.bytes()) << i;
    ASSERT_EQ(bound.Check(), "");
  }
  EXPECT_GT(free.stats().evicted, 50u);
  EXPECT_EQ(bound.stats().over_share, 0u);
}

// What a store gave back belongs to nobody until somebody asks for it by name.
TEST(PrefixTree, ABreakpointIsChargedOnceItsTenantIsKnown) {
  PrefixTree tree(Sizes(1000));
  Filler filler(&tree);
  const Path path = MakePath(Words(1, 10));
  ASSERT_TRUE(filler.Put(path, 4, SnapshotKind::kBreakpoint, 1));
  ASSERT_TRUE(filler.Put(path, 10, kTail, 2, 0, 9));
  EXPECT_EQ(tree.BreakpointBytes(9), 0);
  ASSERT_TRUE(filler.Put(path, 4, SnapshotKind::kBreakpoint, 3, 0, 9));
  EXPECT_EQ(tree.BreakpointBytes(9), 10 + 4);
  ASSERT_TRUE(filler.Put(path, 10, SnapshotKind::kBreakpoint, 4, 0, 9));  // a tail becomes one
  EXPECT_EQ(tree.BreakpointBytes(9), 10 + 4 + 10 + 6);
  ASSERT_TRUE(filler.Put(path, 10, SnapshotKind::kBreakpoint, 5, 0, 11));
  EXPECT_EQ(tree.BreakpointBytes(11), 0) << "whose it was first";
  EXPECT_EQ(tree.Check(), "");
}

TEST(PrefixTree, ABreakpointIsChargedToTheFirstWhoUsesIt) {
  PrefixTree tree(Sizes(1000));
  Filler filler(&tree);
  const Path path = MakePath(Words(1, 10));
  ASSERT_TRUE(filler.Put(path, 4, SnapshotKind::kBreakpoint, 1));
  ASSERT_TRUE(filler.Put(path, 10, kTail, 2));
  tree.Touch(path[3], At(3));
  for (const uint64_t tenant : {9, 11}) {
    tree.Touch(path[3], At(4), tenant);
    tree.Touch(path[9], At(4), tenant);
    EXPECT_EQ(tree.BreakpointBytes(9), 10 + 4);
    EXPECT_EQ(tree.BreakpointBytes(11), 0);
    EXPECT_EQ(tree.Check(), "");
  }
}

// A tenant's breakpoints beyond its share, then what is worth least; nothing twice.
TEST(PrefixTree, WhatGoesNextIsToldAsItGoes) {
  PrefixTreeOptions options = Sizes(40 * 20);
  options.breakpoint_share = 0.25;
  PrefixTree tree(options);
  Filler filler(&tree);
  for (int i = 0; i < 10; ++i) filler.Put(MakePath(Words(i, 10)), 10, kTail, i, 0, 7);
  for (int i = 0; i < 15; ++i) {
    filler.Put(MakePath(Words(100 + i, 10)), 10, SnapshotKind::kBreakpoint, 100 + i, 0, 8);
  }
  const std::vector<PrefixKey> all = tree.NextToGo(100);
  EXPECT_EQ(std::set<PrefixKey>(all.begin(), all.end()).size(), 25u);
  ASSERT_EQ(all.size(), 25u);
  const std::vector<PrefixKey> next = tree.NextToGo(8);
  EXPECT_EQ(next, std::vector<PrefixKey>(all.begin(), all.begin() + 8));
  for (const PrefixKey& key : next) {
    ASSERT_TRUE(tree.EvictOne());
    EXPECT_FALSE(tree.HasSnapshot(key));
  }
  EXPECT_EQ(tree.stats().over_share, 5u);
  EXPECT_EQ(tree.BreakpointBytes(8), 10 * 20);
}

// Of one tenant alone all go in one order, whatever their kind; of two beyond their share whoever has most.
TEST(PrefixTree, WhatGoesNextIsToldAsItGoesToWhoeverIsOverShare) {
  for (const uint64_t other : {8, 9, 10}) {
    PrefixTreeOptions options = Sizes(40 * 20);
    options.breakpoint_share = 0.125;
    PrefixTree tree(options);
    Filler filler(&tree);
    for (int i = 0; i < 20; ++i) {
      const uint64_t tenant = i % 2 == 0 ? 8 : other;
      const SnapshotKind kind = i % 5 == 4 ? kTail : SnapshotKind::kBreakpoint;
      const int blocks = 10 + (i * 7) % 5;
      filler.Put(MakePath(Words(i, blocks)), blocks, kind, i, 0, other == 10 ? 7 + i % 3 : tenant);
    }
    const std::vector<PrefixKey> next = tree.NextToGo(12);
    ASSERT_EQ(next.size(), 12u);
    for (const PrefixKey& key : next) {
      ASSERT_TRUE(tree.HasSnapshot(key));
      ASSERT_TRUE(tree.EvictOne());
      EXPECT_FALSE(tree.HasSnapshot(key)) << other;
    }
    EXPECT_EQ(tree.Check(), "");
  }
}

// With what was above it a breakpoint has become worth more than another of its tenant.
TEST(PrefixTree, WhatGoesForAnothersIsValuedAgain) {
  PrefixTreeOptions options = Sizes(1000);
  options.breakpoint_share = 0;
  PrefixTree tree(options);
  Filler filler(&tree);
  const Path other = MakePath(Words(1, 10)), one = MakePath(Words(2, 20)),
             two = MakePath(Words(3, 10));
  filler.Put(other, 10, kTail, 0, 0, 7);
  filler.Put(one, 19, SnapshotKind::kBreakpoint, 10000, 0, 8);
  filler.Put(one, 20, SnapshotKind::kBreakpoint, 10000, 0, 8);
  filler.Put(two, 10, SnapshotKind::kBreakpoint, 10000, 0, 8);
  tree.Drop(one[18]);
  ASSERT_TRUE(tree.EvictOne());
  EXPECT_EQ(tree.stats().over_share, 1u);
  EXPECT_TRUE(tree.HasSnapshot(other[9]));
  EXPECT_TRUE(tree.HasSnapshot(one[19]));
  EXPECT_FALSE(tree.HasSnapshot(two[9]));
  EXPECT_EQ(tree.Check(), "");
}

}  // namespace
}  // namespace deltamesh

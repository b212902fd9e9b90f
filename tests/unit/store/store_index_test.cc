// The index against a twin that knows only the list of files and looks everything up anew.
#include "runtime/store/store_index.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tests/unit/store/store_fixture.h"

namespace deltamesh {
namespace {

using testing::TestPath;

class Twin {
 public:
  std::map<PrefixKey, StoredState> files;

  // Whether a file and all of its parents are there.
  bool Complete(const PrefixKey& key) const {
    const auto found = files.find(key);
    if (found == files.end()) return false;
    const StoredState& s = found->second;
    if (s.from == 0) return true;
    const auto parent = files.find(s.parent);
    return parent != files.end() && parent->second.from < s.from &&
           s.from <= parent->second.blocks && Complete(s.parent);
  }
  std::set<PrefixKey> Blocks() const {
    std::set<PrefixKey> out;
    for (const auto& [key, s] : files) {
      if (Complete(key)) out.insert(s.keys.begin(), s.keys.end());
    }
    return out;
  }
  std::set<PrefixKey> Snapshots() const {
    std::set<PrefixKey> out;
    for (const auto& [key, s] : files) {
      if (Complete(key)) out.insert(key);
    }
    return out;
  }
  bool Leaf(const PrefixKey& key) const {
    for (const auto& [other, s] : files) {
      if (s.from > 0 && s.parent == key) return false;
    }
    return true;
  }
};

// What was told must be right at each moment: no block without the one before it, no snapshot without its
// block.
class Listener {
 public:
  explicit Listener(const std::vector<std::vector<PrefixKey>>& paths) {
    for (const auto& path : paths) {
      for (size_t i = 1; i < path.size(); ++i) above_[path[i]] = path[i - 1];
    }
  }
  void Hear(const std::vector<StoreChange>& changes) {
    for (const StoreChange& change : changes) {
      switch (change.what) {
        case StoreChange::kBlockAdded:
          ASSERT_TRUE(blocks.insert(change.key).second);
          ASSERT_TRUE(!above_.contains(change.key) || blocks.contains(above_[change.key]));
          break;
        case StoreChange::kBlockDropped:
          ASSERT_TRUE(blocks.erase(change.key));
          for (const auto& [below, above] : above_) {
            ASSERT_FALSE(above == change.key && blocks.contains(below));
          }
          break;
        case StoreChange::kSnapshotAdded:
          ASSERT_TRUE(snapshots.insert(change.key).second);
          ASSERT_TRUE(blocks.contains(change.key));
          break;
        case StoreChange::kSnapshotDropped:
          ASSERT_TRUE(snapshots.erase(change.key));
          ASSERT_TRUE(blocks.contains(change.key));
          break;
      }
    }
  }
  std::set<PrefixKey> blocks, snapshots;

 private:
  std::map<PrefixKey, PrefixKey> above_;
};

// Prompts that share beginnings of every length.
std::vector<std::vector<PrefixKey>> Paths() {
  std::vector<std::vector<PrefixKey>> paths;
  for (uint64_t i = 0; i < 12; ++i) {
    paths.push_back(TestPath(i, 4 + static_cast<int64_t>(i % 5), static_cast<int64_t>(i % 4)));
  }
  return paths;
}

TEST(StoreIndexTest, EqualsItsTwinUnderRandomTraffic) {
  const auto paths = Paths();
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SeededEntropy random(seed);
    StoreIndex index;
    Twin twin;
    Listener listener(paths);
    for (int step = 0; step < 400; ++step) {
      const auto& path = paths[random.Next() % paths.size()];
      const auto blocks = static_cast<int64_t>(1 + random.Next() % path.size());
      const PrefixKey key = path[static_cast<size_t>(blocks - 1)];
      if (random.Next() % 3 != 0) {
        // As a writer does it, or now and then with a parent that need not be there.
        const auto cover = index.Covered(std::span(path).first(static_cast<size_t>(blocks)));
        StoredState s;
        s.key = key;
        s.parent = cover.file;
        s.blocks = blocks;
        s.from = cover.blocks;
        if (random.Next() % 4 == 0 && blocks > 1) {
          s.from = 1 + static_cast<int64_t>(random.Next() % static_cast<uint64_t>(blocks - 1));
          s.parent = path[static_cast<size_t>(s.from - 1)];
        }
        s.kind = static_cast<SnapshotKind>(random.Next() % kSnapshotKinds);
        s.bytes = 100 + static_cast<int64_t>(random.Next() % 900);
        s.used = absl::FromUnixSeconds(static_cast<int64_t>(random.Next() % 10000));
        s.keys.assign(path.begin() + s.from, path.begin() + blocks);
        const bool kept = twin.Complete(key);
        if (!kept) twin.files[key] = s;
        ASSERT_EQ(index.Add(s), !kept);
      } else if (random.Next() % 2 == 0) {
        if (const auto least = index.Least({})) {
          ASSERT_TRUE(twin.Leaf(*least));
          // Whatever cannot be used goes first; then nothing that may go is worth less.
          for (const auto& [other, s] : twin.files) {
            if (!twin.Leaf(other)) continue;
            ASSERT_LE(index.Worth(*least), index.Worth(other));
            ASSERT_TRUE(!twin.Complete(*least) || twin.Complete(other));
          }
          ASSERT_TRUE(index.Remove(*least));
          twin.files.erase(*least);
        }
      } else {  // it vanished, whatever hangs on it
        ASSERT_EQ(index.Remove(key), twin.files.erase(key) == 1);
      }
      listener.Hear(index.TakeChanges());
      if (HasFatalFailure()) return;
      ASSERT_EQ(listener.blocks, twin.Blocks());
      ASSERT_EQ(listener.snapshots, twin.Snapshots());
      int64_t bytes = 0;
      for (const auto& [k, s] : twin.files) bytes += s.bytes;
      ASSERT_EQ(index.bytes(), bytes);
      const auto& probe = paths[random.Next() % paths.size()];
      int64_t deepest = 0, covered = 0;
      for (size_t n = 1; n <= probe.size(); ++n) {
        if (twin.Complete(probe[n - 1])) deepest = static_cast<int64_t>(n);
        if (listener.blocks.contains(probe[n - 1])) covered = static_cast<int64_t>(n);
      }
      ASSERT_EQ(index.Deepest(probe), deepest);
      ASSERT_EQ(index.Covered(probe).blocks, covered);
      if (deepest > 0) {
        int64_t end = deepest;
        for (const StoredPart& part : index.Chain(probe[static_cast<size_t>(deepest - 1)])) {
          ASSERT_EQ(part.end, end);
          ASSERT_EQ(part.begin, twin.files.at(part.file).from);
          ASSERT_LE(part.end, twin.files.at(part.file).blocks);
          end = part.begin;
        }
        ASSERT_EQ(end, 0);
      }
    }
    Listener fresh(paths);
    fresh.Hear(index.Everything());
    EXPECT_EQ(fresh.blocks, listener.blocks);
    EXPECT_EQ(fresh.snapshots, listener.snapshots);
  }
}

TEST(StoreIndexTest, ChangesThatNobodyTakesAreNotKept) {
  const std::vector<PrefixKey> path = TestPath(0, 1);
  const StoredState state = {.key = path[0],
                             .parent = {},
                             .blocks = 1,
                             .bytes = 1,
                             .used = absl::UnixEpoch(),
                             .keys = path};
  for (const bool tells : {true, false}) {
    StoreIndex index({}, tells);
    index.Add(state);
    index.Remove(path[0]);
    EXPECT_EQ(index.TakeChanges().size(), tells ? 4u : 0u);
  }
}

TEST(StoreIndexTest, AgeAndWorthDecideWhatGoes) {
  StoreIndex index;
  const auto add = [&](uint64_t seed, int64_t blocks, SnapshotKind kind, int64_t used) {
    StoredState s{
        .blocks = blocks, .kind = kind, .bytes = 1000, .used = absl::FromUnixSeconds(used)};
    s.keys = TestPath(seed, blocks);
    s.key = s.keys.back();
    index.Add(s);
    return s.key;
  };
  const PrefixKey old = add(1, 4, SnapshotKind::kPromptTail, 0);
  const PrefixKey fresh = add(2, 4, SnapshotKind::kPromptTail, 7200);
  const PrefixKey grid = add(3, 4, SnapshotKind::kGrid, 7200);
  EXPECT_EQ(index.Least({}), old);
  EXPECT_EQ(index.Least({&old, 1}), grid);
  index.Touch(old, absl::FromUnixSeconds(7300));
  EXPECT_EQ(index.Leaves(9), (std::vector<PrefixKey>{grid, fresh, old}));
}

// A bucket tells names only: a file's last key is what is known of it.
TEST(StoreIndexTest, FilesWhoseBlocksAreNotKnownAreFoundByTheirEnd) {
  StoreIndex index;
  const auto path = TestPath(1, 6);
  StoredState state;
  state.key = path[2];
  state.blocks = 3;
  index.Add(state);
  state.key = path[5];
  state.parent = path[2];
  state.blocks = 6;
  state.from = 3;
  index.Add(state);
  EXPECT_EQ(index.Deepest(path), 6);
  EXPECT_EQ(index.Deepest(std::span(path).first(5)), 3);
  EXPECT_EQ(index.Covered(std::span(path).first(5)).blocks, 3);
  EXPECT_EQ(index.Covered(std::span(path).first(5)).file, path[2]);
}

}  // namespace
}  // namespace deltamesh

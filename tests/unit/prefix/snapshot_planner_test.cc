#include "runtime/prefix/snapshot_planner.h"

#include <gtest/gtest.h>

#include <cstring>

#include "runtime/base/random.h"

namespace deltamesh {
namespace {

// A path whose first `shared` blocks are those of `document`, the others its own.
std::vector<PrefixKey> Path(uint64_t document, uint64_t own, int blocks, int shared) {
  std::vector<PrefixKey> path;
  uint64_t h = document;
  for (int i = 0; i < blocks; ++i) {
    h = SeededEntropy(h ^ (i < shared ? 0 : own << 32)).Next();
    std::memcpy(path.emplace_back().bytes.data(), &h, 8);
  }
  return path;
}

class SnapshotPlannerTest : public ::testing::Test {
 protected:
  SnapshotPlannerTest()
      : tree_({.bytes_max = int64_t{1} << 40, .block_bytes = 1, .snapshot_bytes = 1}) {}

  // Looks up, plans and keeps what was planned; counts cuts of the grid.
  int Prompt(SnapshotPlanner& planner, const std::vector<PrefixKey>& path) {
    const PrefixMatch match = tree_.Find(path);
    const std::vector<uint64_t> ids(path.size());
    int grid = 0;
    for (const CutPoint& cut : planner.Plan(tree_, path, match, {})) {
      tree_.Insert(path, ids, 0, {.blocks = cut.blocks, .kind = cut.kind}, absl::UnixEpoch());
      grid += cut.kind == SnapshotKind::kGrid;
    }
    return grid;
  }
  PrefixTree tree_;
};

TEST_F(SnapshotPlannerTest, SharedDocumentsGetAGridAndSessionsDoNot) {
  SnapshotPlanner planner({}, {.memory_prompts = 64, .blocks_asked_min = 1000});
  for (uint64_t turn = 1; turn <= 30; ++turn) {  // appends
    EXPECT_EQ(Prompt(planner, Path(1, 0, static_cast<int>(100 * turn), 0)), 0);
  }
  int grids = 0;
  for (uint64_t i = 0; i < 60; ++i) {  // each document twice, never to the same depth as before
    grids += Prompt(planner, Path(2 + i / 2, i, 300, 200 + static_cast<int>(i % 7)));
  }
  EXPECT_GT(planner.grid_blocks(), 0);
  EXPECT_GT(grids, 0);
  EXPECT_EQ(planner.switched_on(), 1u);
  EXPECT_EQ(planner.switched_off(), 0u);
  for (uint64_t turn = 31; turn <= 160; ++turn)
    Prompt(planner, Path(1, 0, static_cast<int>(100 * turn), 0));
  EXPECT_EQ(planner.grid_blocks(), 0) << planner.grid_share();
  EXPECT_EQ(planner.switched_on(), 1u);
  EXPECT_EQ(planner.switched_off(), 1u);
}

TEST_F(SnapshotPlannerTest, TheGridDoesNotHideThatItIsNeeded) {
  SnapshotPlanner planner({}, {.memory_prompts = 64, .blocks_asked_min = 1000});
  for (uint64_t i = 0; i < 1000; ++i) {
    Prompt(planner, Path(i / 2, i, 300, 200));
    if (i > 100) {
      ASSERT_GT(planner.grid_blocks(), 0) << i << " " << planner.grid_share();
    }
  }
}

TEST_F(SnapshotPlannerTest, AGivenGridStaysAndNoneIsLearnedWhenToldSo) {
  SnapshotPlanner fixed({.grid_blocks = 16}, {});
  EXPECT_EQ(Prompt(fixed, Path(9, 1, 40, 0)), 2);
  SnapshotPlanner none({}, {.grid_blocks = 0});
  for (uint64_t i = 0; i < 200; ++i) EXPECT_EQ(Prompt(none, Path(100 + i / 2, i, 300, 200)), 0);
}

}  // namespace
}  // namespace deltamesh

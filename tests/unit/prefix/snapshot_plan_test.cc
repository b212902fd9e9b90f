#include "runtime/prefix/snapshot_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/prefix/prefix_hash.h"

namespace deltamesh {
namespace {

using ::testing::ElementsAre;

std::vector<PrefixKey> Path(int salt, int blocks, int shared) {
  std::vector<TokenId> tokens;
  for (int i = 0; i < blocks * 64; ++i) tokens.push_back(i < shared * 64 ? i : i + 1000 * salt);
  PrefixChain chain("m", "");
  chain.Append(tokens);
  return chain.keys();
}

class SnapshotPlanTest : public ::testing::Test {
 protected:
  SnapshotPlanTest() : tree_({.bytes_max = 1 << 20, .block_bytes = 1, .snapshot_bytes = 1}) {
    const std::vector<uint64_t> ids(100);
    tree_.Insert(known_, ids, 1, {.blocks = 40}, absl::UnixEpoch());
  }
  std::vector<CutPoint> Plan(const std::vector<PrefixKey>& path,
                             std::vector<int64_t> breakpoints = {},
                             const SnapshotPlanOptions& options = {}, int64_t junction = 0) {
    return PlanCuts(tree_, path, tree_.Find(path),
                    {.breakpoints = breakpoints, .junction = junction}, options);
  }

  const std::vector<PrefixKey> known_ = Path(1, 40, 30);
  PrefixTree tree_;
};

constexpr auto kTail = SnapshotKind::kPromptTail;
constexpr auto kJunction = SnapshotKind::kJunction;
constexpr auto kBreakpoint = SnapshotKind::kBreakpoint;
constexpr auto kGrid = SnapshotKind::kGrid;

TEST_F(SnapshotPlanTest, ANewPromptIsCutAtItsTailAndBreakpoints) {
  const auto path = Path(2, 50, 0);
  EXPECT_THAT(Plan(path), ElementsAre(CutPoint{50, kTail}));
  EXPECT_THAT(
      Plan(path, {0, 63, 64, 640 + 10, 640 + 63, 50 * 64, 51 * 64}),
      ElementsAre(CutPoint{1, kBreakpoint}, CutPoint{10, kBreakpoint}, CutPoint{50, kBreakpoint}));
}

TEST_F(SnapshotPlanTest, WherePromptsPartAJunctionIsTaken) {
  EXPECT_THAT(Plan(Path(2, 50, 30)), ElementsAre(CutPoint{30, kJunction}, CutPoint{50, kTail}));
  EXPECT_THAT(Plan(Path(2, 50, 3)), ElementsAre(CutPoint{50, kTail})) << "too little to save";
  EXPECT_THAT(Plan(Path(2, 30, 30)), ElementsAre(CutPoint{30, kTail})) << "nothing parts here";
}

TEST_F(SnapshotPlanTest, WherePromptsPartElsewhereAJunctionIsTakenToo) {
  const auto plan = [&](const std::vector<PrefixKey>& path, int64_t tokens) {
    return Plan(path, {}, {}, tokens);
  };
  const auto fresh = Path(2, 50, 0), shared = Path(2, 50, 30);
  EXPECT_THAT(plan(fresh, 64 * 10), ElementsAre(CutPoint{10, kJunction}, CutPoint{50, kTail}));
  EXPECT_THAT(plan(fresh, 64 * 3), ElementsAre(CutPoint{50, kTail})) << "too little to save";
  EXPECT_THAT(plan(fresh, 64 * 50), ElementsAre(CutPoint{50, kTail})) << "nothing parts here";
  EXPECT_THAT(plan(fresh, 64 * 51), ElementsAre(CutPoint{50, kTail}));
  EXPECT_THAT(plan(shared, 64 * 30), ElementsAre(CutPoint{30, kJunction}, CutPoint{50, kTail}));
  EXPECT_THAT(plan(shared, 64 * 35),
              ElementsAre(CutPoint{30, kJunction}, CutPoint{35, kJunction}, CutPoint{50, kTail}));
  auto longer = known_;
  for (const PrefixKey& key : Path(3, 9, 0)) longer.push_back(key);
  EXPECT_THAT(plan(longer, 64 * 43), ElementsAre(CutPoint{49, kTail})) << "a snapshot is near";
  EXPECT_THAT(plan(longer, 64 * 44), ElementsAre(CutPoint{44, kJunction}, CutPoint{49, kTail}));
}

TEST_F(SnapshotPlanTest, NothingAtOrBeforeTheSnapshotThatServes) {
  EXPECT_THAT(Plan(known_, {64 * 20}), ElementsAre());
  auto longer = known_;
  longer.push_back(Path(3, 1, 0)[0]);
  EXPECT_THAT(Plan(longer, {64 * 20}), ElementsAre(CutPoint{41, kTail}));
}

TEST_F(SnapshotPlanTest, AGridWithinLongPrompts) {
  const SnapshotPlanOptions grid = {.grid_blocks = 16};
  EXPECT_THAT(Plan(Path(2, 40, 0), {}, grid),
              ElementsAre(CutPoint{16, kGrid}, CutPoint{32, kGrid}, CutPoint{40, kTail}));
  const SnapshotPlanOptions few = {.grid_blocks = 2, .cuts_max = 3};
  EXPECT_THAT(Plan(Path(2, 40, 0), {}, few),
              ElementsAre(CutPoint{36, kGrid}, CutPoint{38, kGrid}, CutPoint{40, kTail}));
}

}  // namespace
}  // namespace deltamesh

// Plans cuts, and learns from the prompts it plans for whether a grid within long prompts pays.
//
// Sessions append: what they ask for stands at tails, ends and junctions, and a grid would only fill
// memory. Documents that many prompts share are asked for from within. The difference shows in each lookup:
// how many of the blocks whose latents are here lie beyond the last snapshot that stands here without a grid.
// A grid would have saved those beyond its own step. When that is a fair share of all that is asked, long
// prompts get a grid; when it no longer is, they get none, and the grid's snapshots, which are worth the
// least, are the first to go.
//
// Deterministic: the same prompts in the same order give the same plans. Not thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/prefix/prefix_tree.h"
#include "runtime/prefix/snapshot_plan.h"

namespace deltamesh {

struct GridLearning {
  int64_t grid_blocks = 32;  // step of the grid while there is one; 0: never
  double on_share = 0.01;    // of the blocks asked for, what a grid would have saved
  double off_share = 0.005;
  double memory_prompts = 512;      // that far back the share is felt: it falls by e
  double blocks_asked_min = 16384;  // evidence before the first grid
};

class SnapshotPlanner {
 public:
  // options.grid_blocks > 0: that grid always, nothing is learned.
  SnapshotPlanner(const SnapshotPlanOptions& options, const GridLearning& learning);

  // As PlanCuts, once for each prompt that is looked up.
  std::vector<CutPoint> Plan(const PrefixTree& tree, std::span<const PrefixKey> path,
                             const PrefixMatch& match, const CutHints& hints);

  int64_t grid_blocks() const { return options_.grid_blocks; }  // now; 0: none
  // How often prompts got a grid, and lost it again.
  uint64_t switched_on() const { return switched_on_; }
  uint64_t switched_off() const { return switched_off_; }
  // Of the blocks asked for, the share that a grid saves or would have saved.
  double grid_share() const { return asked_ > 0 ? wanted_ / asked_ : 0; }

 private:
  void Learn(const PrefixTree& tree, std::span<const PrefixKey> path, const PrefixMatch& match);

  SnapshotPlanOptions options_;
  const GridLearning learning_;
  const bool learns_;
  double asked_ = 0, wanted_ = 0;  // blocks, older ones fading
  uint64_t switched_on_ = 0, switched_off_ = 0;
};

}  // namespace deltamesh

#include "runtime/prefix/snapshot_planner.h"

#include <algorithm>

#include "runtime/base/status.h"

namespace deltamesh {

SnapshotPlanner::SnapshotPlanner(const SnapshotPlanOptions& options, const GridLearning& learning)
    : options_(options),
      learning_(learning),
      learns_(options.grid_blocks == 0 && learning.grid_blocks > 0) {
  CHECK(learning.memory_prompts > 1 && learning.on_share >= learning.off_share,
        "memory %g prompts, on %g, off %g", learning.memory_prompts, learning.on_share,
        learning.off_share);
}

std::vector<CutPoint> SnapshotPlanner::Plan(const PrefixTree& tree, std::span<const PrefixKey> path,
                                            const PrefixMatch& match, const CutHints& hints) {
  if (learns_) Learn(tree, path, match);
  return PlanCuts(tree, path, match, hints, options_);
}

void SnapshotPlanner::Learn(const PrefixTree& tree, std::span<const PrefixKey> path,
                            const PrefixMatch& match) {
  const double keep = 1 - 1 / learning_.memory_prompts;
  asked_ = asked_ * keep + static_cast<double>(path.size());
  wanted_ *= keep;
  if (match.latents.value() > 0) {
    const int64_t lasting =
        tree.LastingSnapshot(path[static_cast<size_t>(match.latents.value() - 1)]);
    wanted_ += static_cast<double>(
        std::max<int64_t>(0, match.latents.value() - lasting - learning_.grid_blocks));
  }
  const bool on = options_.grid_blocks > 0;
  if (!on && asked_ >= learning_.blocks_asked_min && grid_share() > learning_.on_share) {
    options_.grid_blocks = learning_.grid_blocks;
    ++switched_on_;
  } else if (on && grid_share() < learning_.off_share) {
    options_.grid_blocks = 0;
    ++switched_off_;
  }
}

}  // namespace deltamesh

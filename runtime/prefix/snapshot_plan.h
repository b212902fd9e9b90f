// Where the state of a prompt is kept while it is computed.
//
// Positions are cut points of the scheduler, so a snapshot never depends on where a step happened to end. A
// step may pass one, copying the state on the way (scheduler.h); further ones within its reach cost steps:
//   * breakpoints: the end of tools and system text, or where the client said;
//   * a junction: the prompt leaves a known path beyond its deepest snapshot, so the third visitor finds
//     what the second one had to compute. The path may be known to another worker only: its router says so;
//   * a grid within long prompts, when the planner is told to;
//   * the tail: the last block boundary that leaves a token to compute.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/prefix/prefix_tree.h"

namespace deltamesh {

// A junction must save the next visitor at least this much.
inline constexpr int64_t kJunctionBlocksMin = 4;

struct SnapshotPlanOptions {
  int64_t junction_blocks_min = kJunctionBlocksMin;
  int64_t grid_blocks = 0;  // 0: no grid
  int64_t cuts_max = 64;    // per prompt; the tail always, then the deepest
};

// What is known of a prompt elsewhere, as counts of tokens: each is taken at the block boundary at or before
// it, those outside the prompt's path are ignored.
struct CutHints {
  std::span<const int64_t> breakpoints;
  int64_t junction = 0;  // where it leaves a path that another worker knows; 0: nowhere
};

struct CutPoint {
  int64_t blocks;
  SnapshotKind kind;

  friend bool operator==(const CutPoint&, const CutPoint&) = default;
};

// Ascending, each block once (the most lasting kind wins), all beyond match.snapshot, which Find gave for
// `path`. `path` ends with the tail.
std::vector<CutPoint> PlanCuts(const PrefixTree& tree, std::span<const PrefixKey> path,
                               const PrefixMatch& match, const CutHints& hints,
                               const SnapshotPlanOptions& options);

}  // namespace deltamesh

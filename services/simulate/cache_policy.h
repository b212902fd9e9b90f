// Policies of keeping snapshots, by name: the one that workers follow, and plain ones to compare it with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/prefix/prefix_tree.h"
#include "runtime/prefix/snapshot_planner.h"

namespace deltamesh {

struct CachePolicy {
  std::string name;
  bool free_state = false;  // the bound: a state at every block costs nothing
  // Which snapshots are taken.
  bool tails = true, ends = true, junctions = true, breakpoints = true;
  SnapshotPlanOptions plan;
  GridLearning learning;
  int64_t tails_kept = 2, ends_kept = 1, left_kept = 16;
};

// "ours"            what workers do, with their defaults
// "bound"           a state at every 64 tokens for free; what is kept is only latents, least recent first
// "grid:TOKENS"     every TOKENS tokens and nowhere else
// "tail"            ends of prompts, all of them
// "tail+junction"   and where prompts part
// "tail+junction+end"   and ends of answers
// "two-tails"       the same, of a session the newest two tails and one end
absl::StatusOr<CachePolicy> PolicyNamed(const std::string& name);

// Those of the table that agent sessions were measured with.
std::vector<std::string> DefaultPolicies();

}  // namespace deltamesh

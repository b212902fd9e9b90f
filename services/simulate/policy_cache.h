// A worker's prefix cache without memory: the tree and the planner that workers have, under some policy.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/prefix/prefix_tree.h"
#include "runtime/prefix/snapshot_planner.h"
#include "services/simulate/cache_policy.h"

namespace deltamesh {

struct CacheBytes {
  int64_t bytes_max = 0;  // for latents and snapshots together
  int64_t block = 0, snapshot = 0;
};

class PolicyCache {
 public:
  // Not for the bound, which is no tree.
  PolicyCache(const CachePolicy& policy, const CacheBytes& bytes);

  struct Found {
    PrefixMatch match;
    std::vector<CutPoint> cuts;
  };
  // A prompt begins here. `path` ends with its tail.
  Found Open(std::span<const PrefixKey> path, CutHints hints, absl::Time now);
  void Keep(std::span<const PrefixKey> path, const SnapshotSpec& spec, absl::Time now);

  bool keeps_ends() const { return policy_.ends; }
  bool keeps_tails() const { return policy_.tails; }
  PrefixTree& tree() { return tree_; }
  const SnapshotPlanner& planner() const { return planner_; }

 private:
  bool Takes(SnapshotKind kind) const;

  const CachePolicy policy_;
  PrefixTree tree_;
  SnapshotPlanner planner_;
  std::vector<uint64_t> payloads_;  // of no meaning, as many as the longest path
};

}  // namespace deltamesh

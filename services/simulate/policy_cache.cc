#include "services/simulate/policy_cache.h"

#include <algorithm>

namespace deltamesh {
namespace {

PrefixTreeOptions TreeOptions(const CachePolicy& policy, const CacheBytes& bytes) {
  PrefixTreeOptions options;
  options.bytes_max = bytes.bytes_max;
  options.block_bytes = bytes.block;
  options.snapshot_bytes = bytes.snapshot;
  options.tails_kept = policy.tails_kept;
  options.ends_kept = policy.ends_kept;
  options.left_kept = policy.left_kept;
  return options;
}

}  // namespace

PolicyCache::PolicyCache(const CachePolicy& policy, const CacheBytes& bytes)
    : policy_(policy), tree_(TreeOptions(policy, bytes)), planner_(policy.plan, policy.learning) {}

bool PolicyCache::Takes(SnapshotKind kind) const {
  switch (kind) {
    case SnapshotKind::kGrid:
      return true;
    case SnapshotKind::kPromptTail:
      return policy_.tails;
    case SnapshotKind::kAnswerEnd:
      return policy_.ends;
    case SnapshotKind::kJunction:
      return policy_.junctions;
    case SnapshotKind::kBreakpoint:
      return policy_.breakpoints;
  }
  return false;
}

PolicyCache::Found PolicyCache::Open(std::span<const PrefixKey> path, CutHints hints,
                                     absl::Time now) {
  Found found;
  found.match = tree_.Find(path);
  if (found.match.snapshot.value() > 0) {
    tree_.Touch(path[static_cast<size_t>(found.match.snapshot.value() - 1)], now);
  }
  if (!policy_.breakpoints) hints.breakpoints = {};
  found.cuts = planner_.Plan(tree_, path, found.match, hints);
  std::erase_if(found.cuts, [this](const CutPoint& cut) { return !Takes(cut.kind); });
  return found;
}

void PolicyCache::Keep(std::span<const PrefixKey> path, const SnapshotSpec& spec, absl::Time now) {
  if (payloads_.size() < path.size()) payloads_.resize(path.size());
  tree_.Insert(path, payloads_, 0, spec, now);
}

}  // namespace deltamesh

#include "runtime/prefix/snapshot_plan.h"

#include <algorithm>
#include <map>

namespace deltamesh {

std::vector<CutPoint> PlanCuts(const PrefixTree& tree, std::span<const PrefixKey> path,
                               const PrefixMatch& match, const CutHints& hints,
                               const SnapshotPlanOptions& options) {
  const int64_t end = static_cast<int64_t>(path.size());
  std::map<int64_t, SnapshotKind> cuts;
  const auto add = [&](int64_t blocks, SnapshotKind kind) {
    if (blocks <= match.snapshot.value() || blocks > end) return;
    const auto [at, fresh] = cuts.emplace(blocks, kind);
    if (!fresh) at->second = std::max(at->second, kind);
  };

  const auto add_junction = [&](int64_t blocks) {
    const bool pays = blocks - match.snapshot.value() >= options.junction_blocks_min;
    if (blocks < end && pays) add(blocks, SnapshotKind::kJunction);
  };

  add(end, SnapshotKind::kPromptTail);
  for (const int64_t tokens : hints.breakpoints)
    add(tokens / kPrefixBlockTokens, SnapshotKind::kBreakpoint);
  const int64_t known = match.latents.value();
  if (known > 0 && tree.HasChildren(path[static_cast<size_t>(known - 1)])) add_junction(known);
  add_junction(hints.junction / kPrefixBlockTokens);
  if (options.grid_blocks > 0) {
    const int64_t first = (match.snapshot.value() / options.grid_blocks + 1) * options.grid_blocks;
    for (int64_t at = first; at < end; at += options.grid_blocks) add(at, SnapshotKind::kGrid);
  }

  std::vector<CutPoint> out;
  for (const auto& [blocks, kind] : cuts) out.push_back({blocks, kind});
  const size_t most = static_cast<size_t>(std::max<int64_t>(1, options.cuts_max));
  if (out.size() > most) out.erase(out.begin(), out.end() - static_cast<ptrdiff_t>(most));
  return out;
}

}  // namespace deltamesh

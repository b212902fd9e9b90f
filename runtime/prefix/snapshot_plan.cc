#include "runtime/prefix/snapshot_plan.h"

#include <algorithm>
#include <map>

namespace deltamesh {

std::vector<CutPoint> PlanCuts(const PrefixTree& tree, std::span<const PrefixKey> path,
                               const PrefixMatch& match, std::span<const int64_t> breakpoints,
                               const SnapshotPlanOptions& options) {
  const int64_t end = static_cast<int64_t>(path.size());
  std::map<int64_t, SnapshotKind> cuts;
  const auto add = [&](int64_t blocks, SnapshotKind kind) {
    if (blocks <= match.snapshot.value() || blocks > end) return;
    const auto [at, fresh] = cuts.emplace(blocks, kind);
    if (!fresh) at->second = std::max(at->second, kind);
  };

  add(end, SnapshotKind::kPromptTail);
  for (const int64_t tokens : breakpoints)
    add(tokens / kPrefixBlockTokens, SnapshotKind::kBreakpoint);
  if (match.latents.value() < end &&
      match.latents.value() - match.snapshot.value() >= options.junction_blocks_min &&
      tree.HasChildren(path[static_cast<size_t>(match.latents.value() - 1)])) {
    add(match.latents.value(), SnapshotKind::kJunction);
  }
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

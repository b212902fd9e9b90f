#include "services/simulate/free_state_cache.h"

#include "runtime/base/status.h"

namespace deltamesh {

FreeStateCache::FreeStateCache(int64_t bytes_max, int64_t block_bytes)
    : blocks_max_(block_bytes > 0 ? bytes_max / block_bytes : INT64_MAX - 1) {}

// As PrefixTree finds it: what is here of a path has no gaps.
FreeStateCache::Index FreeStateCache::Deepest(std::span<const PrefixKey> path) const {
  size_t here = 0, gone = path.size() + 1;
  Index deepest = kNone;
  while (here + 1 < gone) {
    const size_t middle = here + (gone - here) / 2;
    const auto found = by_key_.find(path[middle - 1]);
    if (found == by_key_.end()) {
      gone = middle;
    } else {
      here = middle;
      deepest = found->second;
    }
  }
  return deepest;
}

void FreeStateCache::Mark(Index node) {
  ++clock_;
  for (Index at = node; at != kNone; at = nodes_[static_cast<size_t>(at)].parent) {
    Node& n = nodes_[static_cast<size_t>(at)];
    if (n.children == 0) {
      leaves_.erase({n.used, at});
      leaves_.emplace(clock_, at);
    }
    n.used = clock_;
  }
}

int64_t FreeStateCache::Use(std::span<const PrefixKey> path) {
  const Index node = Deepest(path);
  if (node == kNone) return 0;
  Mark(node);
  return nodes_[static_cast<size_t>(node)].depth;
}

void FreeStateCache::Add(std::span<const PrefixKey> path) {
  Index at = Deepest(path);
  if (at != kNone) Mark(at);
  ++clock_;
  size_t depth = at == kNone ? 0 : static_cast<size_t>(nodes_[static_cast<size_t>(at)].depth);
  for (; depth < path.size(); ++depth) {
    if (at != kNone) {  // counted before there is one, so that its parent stays while room is made
      Node& above = nodes_[static_cast<size_t>(at)];
      if (above.children++ == 0) leaves_.erase({above.used, at});
    }
    while (Full() && !leaves_.empty()) EvictOne();
    if (Full()) {  // the path alone fills all
      if (at != kNone) --nodes_[static_cast<size_t>(at)].children;
      break;
    }
    Index index;
    if (free_.empty()) {
      index = static_cast<Index>(nodes_.size());
      nodes_.emplace_back();
    } else {
      index = free_.back();
      free_.pop_back();
    }
    nodes_[static_cast<size_t>(index)] = {.key = path[depth],
                                          .parent = at,
                                          .children = 0,
                                          .depth = static_cast<int32_t>(depth + 1),
                                          .used = clock_};
    by_key_.emplace(path[depth], index);
    ++blocks_;
    at = index;
  }
  if (at != kNone && nodes_[static_cast<size_t>(at)].children == 0) {
    leaves_.emplace(nodes_[static_cast<size_t>(at)].used, at);
  }
}

void FreeStateCache::EvictOne() {
  const Index index = leaves_.begin()->second;
  leaves_.erase(leaves_.begin());
  Node& node = nodes_[static_cast<size_t>(index)];
  CHECK(node.children == 0);
  by_key_.erase(node.key);
  free_.push_back(index);
  --blocks_;
  ++evicted_;
  if (node.parent == kNone) return;
  Node& above = nodes_[static_cast<size_t>(node.parent)];
  if (--above.children == 0) leaves_.emplace(above.used, node.parent);
}

}  // namespace deltamesh

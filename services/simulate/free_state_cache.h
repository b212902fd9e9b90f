// The bound: what a cache of this capacity could answer if a state at every block cost nothing. Holds latents
// only; the least recently used go first, a block after those that follow it.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "runtime/prefix/prefix_key.h"

namespace deltamesh {

class FreeStateCache {
 public:
  FreeStateCache(int64_t bytes_max, int64_t block_bytes);

  // Leading blocks of the path that are here. They count as used now.
  int64_t Use(std::span<const PrefixKey> path);
  // All of the path is here from now on, as far as it fits.
  void Add(std::span<const PrefixKey> path);

  int64_t blocks() const { return blocks_; }
  int64_t evicted() const { return evicted_; }

 private:
  using Index = int32_t;
  static constexpr Index kNone = -1;
  struct Node {
    PrefixKey key;
    Index parent = kNone;
    int32_t children = 0;
    int32_t depth = 0;
    uint64_t used = 0;
  };

  Index Deepest(std::span<const PrefixKey> path) const;
  void Mark(Index node);
  void EvictOne();
  bool Full() const { return (blocks_ + 1) > blocks_max_; }

  const int64_t blocks_max_;
  absl::flat_hash_map<PrefixKey, Index> by_key_;
  std::vector<Node> nodes_;
  std::vector<Index> free_;
  std::set<std::pair<uint64_t, Index>> leaves_;  // by use
  uint64_t clock_ = 0;
  int64_t blocks_ = 0, evicted_ = 0;
};

}  // namespace deltamesh

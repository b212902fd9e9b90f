// How much of a prompt is held, in blocks from its beginning: so far its latents, so far a snapshot. A prompt
// can go on only from a snapshot that stands within latents, so the two are counts of different things: what
// caches, stores and indexes find keeps them apart, and whoever reckons with both takes the values.
#pragma once

#include <compare>
#include <cstdint>

namespace deltamesh {

template <typename Fact>
class MatchBlocks {
 public:
  constexpr MatchBlocks() = default;
  constexpr explicit MatchBlocks(int64_t blocks) : blocks_(blocks) {}
  constexpr int64_t value() const { return blocks_; }

  friend constexpr auto operator<=>(const MatchBlocks&, const MatchBlocks&) = default;

 private:
  int64_t blocks_ = 0;
};

using LatentBlocks = MatchBlocks<struct LatentFact>;
using SnapshotBlocks = MatchBlocks<struct SnapshotFact>;

}  // namespace deltamesh

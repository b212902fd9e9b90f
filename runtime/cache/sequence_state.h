// The state of one sequence: a slab, the latent blocks that cover its positions, and its position.
//
// Not thread-safe; owned by the engine that advances it. Invariants:
//   blocks().size() == ceil(position / 64) once advanced, the last one possibly open;
//   a block behind the position's block is full and immutable, and may be shared.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/cache/pools.h"
#include "runtime/cache/state_layout.h"

namespace deltamesh {

// Both pools of a worker, sized once from flags.
struct StatePools {
  StateLayout layout;
  std::shared_ptr<FixedPool> slabs;   // layout.slab_floats() each
  std::shared_ptr<FixedPool> blocks;  // layout.block_floats() each

  static absl::StatusOr<StatePools> Create(const StateLayout& layout, int64_t slabs,
                                           int64_t blocks);
};

// Pointers into one KDA layer's part of a slab.
struct SlabLayer {
  float* s;      // [heads][dim (key)][dim (value)]
  float* conv;   // [3: q, k, v][taps - 1, oldest first][channels]
  float* decay;  // [heads][dim]
  float* khat;   // [heads][dim][16]
  float* u;      // [heads][16][dim]
};

class SequenceState {
 public:
  // An empty sequence at position 0. RESOURCE_EXHAUSTED when no slab is free.
  static absl::StatusOr<std::unique_ptr<SequenceState>> Create(const StatePools& pools);
  // The same with S and conv undefined: for a caller that writes all of both before they are read.
  static absl::StatusOr<std::unique_ptr<SequenceState>> CreateUnset(const StatePools& pools);

  const StateLayout& layout() const { return pools_.layout; }
  int64_t position() const { return position_; }
  int64_t open_rows() const { return position_ % kTileTokens; }
  SlabLayer slab_layer(int64_t kda_index) const;  // kda_index counts KDA layers only
  const SlotRef& slab() const { return slab_; }
  const std::vector<SlotRef>& blocks() const { return blocks_; }

  // [64][latent_width] of one MLA layer (mla_index counts MLA layers only) in block `block`.
  float* block_layer(int64_t block, int64_t mla_index) const;

  // Takes blocks from the pool so that `tokens` more positions fit. On RESOURCE_EXHAUSTED nothing was taken.
  absl::Status Reserve(int64_t tokens);
  // Called by the model after it wrote the state of `tokens` more positions.
  void Advance(int64_t tokens);

  // Puts the state at `position` (a multiple of 64) with the given full blocks; S and conv of the slab must
  // have been filled already, the open tile is set to empty here.
  void Restore(int64_t position, std::vector<SlotRef> blocks);
  // The same for a sequence that was not advanced since its open tile was emptied last. A step that failed
  // half-way is not seen: such a sequence is of no use but to Restore.
  void Place(int64_t position, std::vector<SlotRef> blocks);
  // Sets the open tile of every layer to empty (decay 1, khat 0, u 0).
  void ResetOpenTile();

 private:
  SequenceState(const StatePools& pools, SlotRef slab) : pools_(pools), slab_(std::move(slab)) {}
  StatePools pools_;
  SlotRef slab_;
  std::vector<SlotRef> blocks_;
  int64_t position_ = 0;
  bool advanced_ = false;  // since the open tile was emptied last
};

}  // namespace deltamesh

#include "runtime/cache/sequence_state.h"

#include <algorithm>

#include "runtime/base/status.h"
#include "runtime/cache/available_memory.h"

namespace deltamesh {
namespace {

// Memory is committed when touched, so pools larger than what there is would start well and be killed
// under load.
absl::Status CheckBacked(const StatePools& pools) {
  const int64_t slabs = pools.slabs->slots() * pools.layout.slab_bytes();
  const int64_t blocks = pools.blocks->slots() * pools.layout.block_bytes();
  const absl::StatusOr<int64_t> available = AvailableMemory();
  if (!available.ok() || slabs <= *available - blocks) return absl::OkStatus();
  const bool blocks_larger = blocks >= slabs;
  return ResourceExhausted(
      "%s: %d bytes, with %d of the %s more than the %d bytes of memory available; lower %s",
      blocks_larger ? "latent block pool" : "slab pool", std::max(blocks, slabs),
      std::min(blocks, slabs), blocks_larger ? "slab pool" : "latent block pool", *available,
      blocks_larger ? "--latent-blocks" : "--slabs");
}

}  // namespace

absl::StatusOr<StatePools> StatePools::Create(const StateLayout& layout, int64_t slabs,
                                              int64_t blocks) {
  StatePools pools;
  pools.layout = layout;
  ASSIGN_OR_RETURN(pools.slabs, FixedPool::Create("slab pool", slabs, layout.slab_floats()));
  ASSIGN_OR_RETURN(pools.blocks,
                   FixedPool::Create("latent block pool", blocks, layout.block_floats()));
  RETURN_IF_ERROR(CheckBacked(pools));
  return pools;
}

absl::StatusOr<std::unique_ptr<SequenceState>> SequenceState::CreateUnset(const StatePools& pools) {
  ASSIGN_OR_RETURN(SlotRef slab, pools.slabs->Take());
  std::unique_ptr<SequenceState> state(new SequenceState(pools, std::move(slab)));
  state->ResetOpenTile();
  return state;
}

absl::StatusOr<std::unique_ptr<SequenceState>> SequenceState::Create(const StatePools& pools) {
  ASSIGN_OR_RETURN(std::unique_ptr<SequenceState> state, CreateUnset(pools));
  const StateLayout& l = pools.layout;
  for (int64_t i = 0; i < l.kda_layers; ++i) {
    const SlabLayer layer = state->slab_layer(i);
    std::fill_n(layer.s, l.s_floats(), 0.0f);
    std::fill_n(layer.conv, l.conv_floats(), 0.0f);
  }
  return state;
}

SlabLayer SequenceState::slab_layer(int64_t kda_index) const {
  const StateLayout& l = layout();
  CHECK(kda_index >= 0 && kda_index < l.kda_layers, "KDA layer %d of %d", kda_index, l.kda_layers);
  float* p = slab_.data() + kda_index * l.slab_layer_floats();
  SlabLayer layer;
  layer.s = p;
  layer.conv = layer.s + l.s_floats();
  layer.decay = layer.conv + l.conv_floats();
  layer.khat = layer.decay + l.decay_floats();
  layer.u = layer.khat + l.khat_floats();
  return layer;
}

float* SequenceState::block_layer(int64_t block, int64_t mla_index) const {
  CHECK(block >= 0 && block < static_cast<int64_t>(blocks_.size()), "block %d of %d", block,
        blocks_.size());
  return blocks_[static_cast<size_t>(block)].data() + mla_index * layout().block_layer_floats();
}

absl::Status SequenceState::Reserve(int64_t tokens) {
  const int64_t need = (position_ + tokens + kBlockTokens - 1) / kBlockTokens;
  const size_t before = blocks_.size();
  const int64_t more = need - static_cast<int64_t>(before);
  if (more > 0 && !pools_.blocks->CouldTake(more)) {
    return ResourceExhausted(
        "latent block pool: %d more blocks are needed and %d of %d are free; retry later, or start "
        "with a larger pool",
        more, pools_.blocks->free_slots(), pools_.blocks->slots());
  }
  while (static_cast<int64_t>(blocks_.size()) < need) {
    absl::StatusOr<SlotRef> block = pools_.blocks->Take();
    if (!block.ok()) {
      blocks_.resize(before);
      return block.status();
    }
    blocks_.push_back(*std::move(block));
  }
  return absl::OkStatus();
}

void SequenceState::Advance(int64_t tokens) {
  advanced_ = true;
  position_ += tokens;
  CHECK(position_ <= static_cast<int64_t>(blocks_.size()) * kBlockTokens,
        "position %d lies beyond %d reserved blocks", position_, blocks_.size());
}

void SequenceState::Place(int64_t position, std::vector<SlotRef> blocks) {
  CHECK(!advanced_, "the open tile of a sequence at %d is in use", position_);
  CHECK(position % kBlockTokens == 0, "position %d is not a block boundary", position);
  CHECK(static_cast<int64_t>(blocks.size()) * kBlockTokens >= position, "%d blocks for position %d",
        blocks.size(), position);
  blocks_ = std::move(blocks);
  position_ = position;
}

void SequenceState::Restore(int64_t position, std::vector<SlotRef> blocks) {
  ResetOpenTile();
  Place(position, std::move(blocks));
}

void SequenceState::ResetOpenTile() {
  const StateLayout& l = layout();
  for (int64_t i = 0; i < l.kda_layers; ++i) {
    const SlabLayer layer = slab_layer(i);
    std::fill_n(layer.decay, l.decay_floats(), 1.0f);
    std::fill_n(layer.khat, l.khat_floats(), 0.0f);
    std::fill_n(layer.u, l.u_floats(), 0.0f);
  }
  advanced_ = false;
}

}  // namespace deltamesh

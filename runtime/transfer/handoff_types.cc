#include "runtime/transfer/handoff_types.h"

#include "runtime/base/status.h"

namespace deltamesh {

mesh::TransferKey TransferKeyOf(const mesh::Landing& landing) {
  mesh::TransferKey key;
  key.set_transfer_id(landing.transfer_id());
  key.set_token_low(landing.token_low());
  key.set_token_high(landing.token_high());
  key.set_receiver_epoch(landing.receiver_epoch());
  return key;
}

std::string_view ReasonName(mesh::RefusalReason reason) {
  if (!mesh::RefusalReason_IsValid(reason)) return "UNKNOWN";
  return mesh::RefusalReason_Name(reason);
}

absl::StatusCode ReasonCode(mesh::RefusalReason reason) {
  switch (reason) {
    case mesh::NONE:
      return absl::StatusCode::kOk;
    case mesh::UNKNOWN_TRANSFER:
    case mesh::NOT_HELD:
      return absl::StatusCode::kNotFound;
    case mesh::STALE_EPOCH:
    case mesh::WRONG_MODEL:
    case mesh::WRONG_LAYOUT:
      return absl::StatusCode::kFailedPrecondition;
    case mesh::TIMEOUT:
      return absl::StatusCode::kDeadlineExceeded;
    case mesh::BUSY:
      return absl::StatusCode::kResourceExhausted;
    case mesh::PEER_LOST:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::StatusCode::kDataLoss;
  }
}

bool ReasonRetryable(mesh::RefusalReason reason) {
  return reason != mesh::WRONG_MODEL && reason != mesh::WRONG_LAYOUT;
}

RegionPlan::RegionPlan(const StateLayout& layout, int64_t position, int64_t have_blocks)
    : layout_(layout), position_(position), have_blocks_(have_blocks) {
  CHECK(position >= 0 && position % kBlockTokens == 0, "position %d is not a block boundary",
        position);
  CHECK(have_blocks >= 0 && have_blocks <= blocks(), "%d held blocks of %d", have_blocks, blocks());
}

int64_t RegionPlan::bytes() const {
  return (blocks() - have_blocks_) * layout_.block_bytes() + layout_.snapshot_bytes();
}

mesh::Region RegionPlan::At(int64_t index) const {
  CHECK(index >= 0 && index < size(), "region %d of %d", index, size());
  mesh::Region region;
  region.set_index(static_cast<uint32_t>(index));
  region.set_dtype(mesh::FLOAT32);
  region.set_token_count(static_cast<uint64_t>(position_));
  if (index < latents()) {
    region.set_kind(mesh::LATENTS);
    region.set_layer(static_cast<uint32_t>(index % layout_.mla_layers));
    region.set_block(static_cast<uint32_t>(have_blocks_ + index / layout_.mla_layers));
    region.set_bytes(static_cast<uint64_t>(layout_.block_layer_floats() * 4));
    return region;
  }
  const int64_t i = index - latents();
  region.set_layer(static_cast<uint32_t>(i / 2));
  if (i % 2 == 0) {
    region.set_kind(mesh::KDA_STATE);
    region.set_head_end(static_cast<uint32_t>(layout_.heads));
    region.set_bytes(static_cast<uint64_t>(layout_.s_floats() * 4));
  } else {
    region.set_kind(mesh::CONV_STATE);
    region.set_bytes(static_cast<uint64_t>(layout_.conv_floats() * 4));
  }
  return region;
}

int64_t RegionPlan::Find(const mesh::Region& region) const {
  const int64_t layer = region.layer();
  const int64_t block = region.block();
  switch (region.kind()) {
    case mesh::LATENTS:
      if (layer >= layout_.mla_layers || block < have_blocks_ || block >= blocks()) return -1;
      return LatentsIndex(block, layer);
    case mesh::KDA_STATE:
      return layer < layout_.kda_layers && block == 0 ? StateIndex(layer) : -1;
    case mesh::CONV_STATE:
      return layer < layout_.kda_layers && block == 0 ? ConvIndex(layer) : -1;
    default:
      return -1;
  }
}

std::string RegionPlan::Name(int64_t index) const {
  const mesh::Region region = At(index);
  const std::string kind = mesh::RegionKind_Name(region.kind());
  if (region.kind() == mesh::LATENTS) {
    return absl::StrFormat("%s layer %d block %d", kind, region.layer(), region.block());
  }
  return absl::StrFormat("%s layer %d", kind, region.layer());
}

std::span<float> SlabStateSpan(const StateLayout& layout, float* slab, int64_t kda_layer) {
  return {slab + kda_layer * layout.slab_layer_floats(), static_cast<size_t>(layout.s_floats())};
}

std::span<float> SlabConvSpan(const StateLayout& layout, float* slab, int64_t kda_layer) {
  return {slab + kda_layer * layout.slab_layer_floats() + layout.s_floats(),
          static_cast<size_t>(layout.conv_floats())};
}

std::span<float> SnapshotStateSpan(const StateLayout& layout, float* snapshot, int64_t kda_layer) {
  return {snapshot + kda_layer * (layout.s_floats() + layout.conv_floats()),
          static_cast<size_t>(layout.s_floats())};
}

std::span<float> SnapshotConvSpan(const StateLayout& layout, float* snapshot, int64_t kda_layer) {
  return {SnapshotStateSpan(layout, snapshot, kda_layer).data() + layout.s_floats(),
          static_cast<size_t>(layout.conv_floats())};
}

std::span<float> BlockLatentsSpan(const StateLayout& layout, float* block, int64_t mla_layer) {
  return {block + mla_layer * layout.block_layer_floats(),
          static_cast<size_t>(layout.block_layer_floats())};
}

}  // namespace deltamesh

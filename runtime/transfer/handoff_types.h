// What both ends of a hand-off agree on: which regions a state at a position has, where each lies
// in memory, and what a refusal means. See proto/deltamesh/mesh/handoff.proto for the wire.
//
// Region.layer counts layers of its own kind: KDA layers for KDA_STATE and CONV_STATE, MLA layers
// for LATENTS.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "deltamesh/mesh/handoff.pb.h"
#include "deltamesh/mesh/mesh.pb.h"
#include "runtime/cache/sequence_state.h"

namespace deltamesh {

// What senders cut regions into; receivers take longer segments, too. With its header one fits into 64 KiB,
// what a TCP packet holds on loopback and a network card cuts at once, and goes eagerly: sent from where it
// lies, checked and copied where it arrives in the caches. Half of it costs 10 to 20 % of the rate, a packet
// and a bit more than half (tools/bench/README.md).
inline constexpr int64_t kHandoffSegmentBytesMax = 63 << 10;

// Bounds of the protocol.
// A manifest or seal up to this long travels in the header; a longer one in the payload, with the
// key alone in the header.
inline constexpr int64_t kHandoffInlineBytes = 4 << 10;
// Most bytes one region may take in a serialised manifest; bounds what a receiver will buffer.
inline constexpr int64_t kHandoffRegionWireBytes = 96;

// The silence after which either end gives a transfer up, unless told otherwise.
inline constexpr absl::Duration kHandoffIdleMax = absl::Seconds(10);
// How many signs of life a sender gives within the silence its receiver tolerates.
inline constexpr int kHandoffAlivePerIdle = 4;

// What must agree before two processes may exchange state. Mirrors mesh.ModelIdentity.
struct HandoffIdentity {
  std::string digest;  // of the model: configuration, tensor table, weight content
  uint32_t state_layout = kStateLayoutVersion;
  uint32_t block_tokens = kBlockTokens;
  uint32_t tile_tokens = kTileTokens;
  uint32_t protocol = 1;

  friend bool operator==(const HandoffIdentity&, const HandoffIdentity&) = default;
};

// What the messages of the hand-off for which `landing` was granted are known by.
mesh::TransferKey TransferKeyOf(const mesh::Landing& landing);

// "CHECKSUM", "WRONG_MODEL", ...: the name reported in results and metrics.
std::string_view ReasonName(mesh::RefusalReason reason);
// The canonical code of a refusal; OK for NONE.
absl::StatusCode ReasonCode(mesh::RefusalReason reason);
// Whether another prefill of the same prompt may succeed. A model or layout mismatch stays one.
bool ReasonRetryable(mesh::RefusalReason reason);

// The regions of a state at `position` whose first `have_blocks` blocks are not sent, in the order
//   for each block, for each MLA layer: LATENTS; then for each KDA layer: KDA_STATE, CONV_STATE.
class RegionPlan {
 public:
  // `position` is a multiple of kBlockTokens and have_blocks * kBlockTokens <= position.
  RegionPlan(const StateLayout& layout, int64_t position, int64_t have_blocks);

  int64_t size() const { return latents() + 2 * layout_.kda_layers; }
  int64_t position() const { return position_; }
  int64_t blocks() const { return position_ / kBlockTokens; }
  int64_t have_blocks() const { return have_blocks_; }
  int64_t bytes() const;  // of all regions

  int64_t LatentsIndex(int64_t block, int64_t mla_layer) const {
    return (block - have_blocks_) * layout_.mla_layers + mla_layer;
  }
  int64_t StateIndex(int64_t kda_layer) const { return latents() + 2 * kda_layer; }
  int64_t ConvIndex(int64_t kda_layer) const { return latents() + 2 * kda_layer + 1; }

  mesh::Region At(int64_t index) const;
  // Index of the planned region with the kind, layer and block of `region`; -1 when there is none.
  int64_t Find(const mesh::Region& region) const;
  // "KDA_STATE layer 3", "LATENTS layer 1 block 7".
  std::string Name(int64_t index) const;

 private:
  int64_t latents() const { return (blocks() - have_blocks_) * layout_.mla_layers; }
  StateLayout layout_;
  int64_t position_;
  int64_t have_blocks_;
};

// Where a KDA layer's S and conv lie in a slab, and an MLA layer's rows in a block. The slab and
// block layouts are the canonical wire layout, so these spans are sent and received as they are.
std::span<float> SlabStateSpan(const StateLayout& layout, float* slab, int64_t kda_layer);
std::span<float> SlabConvSpan(const StateLayout& layout, float* slab, int64_t kda_layer);
// The same of a snapshot's memory: [kda layer][S | conv] (runtime/cache/prefix_cache.h).
std::span<float> SnapshotStateSpan(const StateLayout& layout, float* snapshot, int64_t kda_layer);
std::span<float> SnapshotConvSpan(const StateLayout& layout, float* snapshot, int64_t kda_layer);
std::span<float> BlockLatentsSpan(const StateLayout& layout, float* block, int64_t mla_layer);

}  // namespace deltamesh

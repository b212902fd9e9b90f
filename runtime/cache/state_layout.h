// Sizes of everything a sequence carries. Knows shapes, not models.
//
// Two grids in absolute positions: a tile (16 tokens) is where the recurrent state may change, a block
// (64 tokens) is the unit of latents, of hashing, of snapshots and of moving.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace deltamesh {

inline constexpr int64_t kTileTokens = 16;
inline constexpr int64_t kBlockTokens = 64;
// Version of the canonical wire layout of state; see proto/deltamesh/mesh/handoff.proto.
inline constexpr uint32_t kStateLayoutVersion = 1;

struct StateLayout {
  int64_t kda_layers = 0;
  int64_t heads = 0;      // KDA heads
  int64_t dim = 0;        // KDA key and value width
  int64_t conv_taps = 0;  // tails hold taps - 1 inputs
  int64_t mla_layers = 0;
  int64_t rank = 0;  // latent width
  int64_t rope = 0;  // extra key width

  int64_t channels() const { return heads * dim; }
  int64_t latent_width() const { return rank + rope; }

  // Floats of each part, per KDA layer.
  int64_t s_floats() const { return heads * dim * dim; }
  int64_t conv_floats() const {
    return 3 * (conv_taps - 1) * channels();
  }  // [q, k, v][oldest..][channel]
  int64_t decay_floats() const { return heads * dim; }
  int64_t khat_floats() const { return heads * dim * kTileTokens; }
  int64_t u_floats() const { return heads * kTileTokens * dim; }

  // One slab: for every KDA layer [S | conv | decay | khat | u].
  int64_t slab_layer_floats() const {
    return s_floats() + conv_floats() + decay_floats() + khat_floats() + u_floats();
  }
  int64_t slab_floats() const { return kda_layers * slab_layer_floats(); }
  int64_t slab_bytes() const { return slab_floats() * 4; }

  // One latent block: for every MLA layer [64][latent_width].
  int64_t block_layer_floats() const { return kBlockTokens * latent_width(); }
  int64_t block_floats() const { return mla_layers * block_layer_floats(); }
  int64_t block_bytes() const { return block_floats() * 4; }

  // What a snapshot at a block boundary holds of a slab (the open tile is empty there).
  int64_t snapshot_bytes() const { return kda_layers * (s_floats() + conv_floats()) * 4; }

  friend bool operator==(const StateLayout&, const StateLayout&) = default;
};

}  // namespace deltamesh

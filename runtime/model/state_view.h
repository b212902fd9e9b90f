// A sequence's state in the form other implementations keep it, for comparing with them.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/cache/sequence_state.h"

namespace deltamesh {

// The recurrent state of one KDA layer at the sequence's position, [heads][dim (key)][dim (value)]: the
// open tile applied to a copy, as the fold at the next tile boundary would apply it.
std::vector<float> RecurrentState(const SequenceState& state, int64_t kda_index);

// The last inputs of the short convolutions, [3: q, k, v][taps - 1, oldest first][channels].
std::vector<float> ConvTails(const SequenceState& state, int64_t kda_index);

// Latents [position, rank] and extra keys [position, rope] of one MLA layer.
std::vector<float> Latents(const SequenceState& state, int64_t mla_index);
std::vector<float> ExtraKeys(const SequenceState& state, int64_t mla_index);

}  // namespace deltamesh

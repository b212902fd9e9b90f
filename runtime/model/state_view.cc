#include "runtime/model/state_view.h"

#include <cmath>

namespace deltamesh {

std::vector<float> RecurrentState(const SequenceState& state, int64_t kda_index) {
  const StateLayout& l = state.layout();
  const SlabLayer slab = state.slab_layer(kda_index);
  const int64_t dim = l.dim, open = state.open_rows();
  std::vector<float> now(static_cast<size_t>(l.s_floats()));
  for (int64_t h = 0; h < l.heads; ++h) {
    const float* u = slab.u + h * kTileTokens * dim;
    for (int64_t d = 0; d < dim; ++d) {
      const int64_t channel = h * dim + d;
      const float* khat = slab.khat + channel * kTileTokens;
      for (int64_t v = 0; v < dim; ++v) {
        float s = slab.decay[channel] * slab.s[channel * dim + v];
        for (int64_t j = 0; j < open; ++j) s = std::fma(khat[j], u[j * dim + v], s);
        now[static_cast<size_t>(channel * dim + v)] = s;
      }
    }
  }
  return now;
}

std::vector<float> ConvTails(const SequenceState& state, int64_t kda_index) {
  const float* conv = state.slab_layer(kda_index).conv;
  return {conv, conv + state.layout().conv_floats()};
}

namespace {

// Columns [begin, end) of every written row of one MLA layer.
std::vector<float> BlockColumns(const SequenceState& state, int64_t mla_index, int64_t begin,
                                int64_t end) {
  std::vector<float> out;
  out.reserve(static_cast<size_t>(state.position() * (end - begin)));
  for (int64_t p = 0; p < state.position(); ++p) {
    const float* row = state.block_layer(p / kBlockTokens, mla_index) +
                       p % kBlockTokens * state.layout().latent_width();
    out.insert(out.end(), row + begin, row + end);
  }
  return out;
}

}  // namespace

std::vector<float> Latents(const SequenceState& state, int64_t mla_index) {
  return BlockColumns(state, mla_index, 0, state.layout().rank);
}

std::vector<float> ExtraKeys(const SequenceState& state, int64_t mla_index) {
  return BlockColumns(state, mla_index, state.layout().rank, state.layout().latent_width());
}

}  // namespace deltamesh

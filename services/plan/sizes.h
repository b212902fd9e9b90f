// Bytes of what a sequence keeps, and of what it would keep with other attention. Pure arithmetic.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/plan/model_shape.h"

namespace deltamesh {

// Bytes of a stored value. The engine keeps all of it in four.
struct CacheWidths {
  double latent = 4;
  double state = 4;
  double conv = 4;
};
// "f32", "bf16" or "fp8"; `what` names the flag in the message.
absl::StatusOr<double> BytesOfType(const std::string& what, const std::string& type);

struct SequenceSizes {
  double state = 0;  // recurrent state, all layers
  double conv = 0;   // inputs that the convolutions still need
  double open_tile =
      0;  // of a running sequence only: the up to 15 tokens not yet folded into the state
  double per_token = 0;  // latents
  double per_block = 0;

  double snapshot() const { return state + conv; }  // what moves and rests besides latents
  double running() const { return snapshot() + open_tile; }
  // Latents are held in whole blocks.
  double latents(int64_t tokens) const;
  double resting(int64_t tokens) const { return snapshot() + latents(tokens); }
};
SequenceSizes SizesOf(const ModelShape& shape, const CacheWidths& widths);

// The tokens whose latents take as much as the state: below it the fixed part decides.
int64_t BreakEvenTokens(const SequenceSizes& sizes);

// The cache of one sequence if every layer of the model kept another kind of attention.
struct CacheVariant {
  std::string name;
  std::string how;  // what is kept, in words
  double per_token = 0;
  double fixed = 0;
  double bytes = 0;  // at the asked length
};
struct VariantOptions {
  int64_t tokens = 32768;
  int64_t groups = 8;      // key and value heads of grouped-query attention
  int64_t window = 4096;   // tokens that a sliding layer keeps
  double value_bytes = 2;  // of a key or value, and of a latent
};
// "this model" first.
std::vector<CacheVariant> CompareCaches(const ModelShape& shape, const CacheWidths& widths,
                                        const VariantOptions& options);

}  // namespace deltamesh

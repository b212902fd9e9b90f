// What one token must cost, whatever the engine: the numerators of a benchmark's fractions of a ceiling.
#pragma once

#include <cstdint>

#include "runtime/model/model.h"

namespace deltamesh {

// Bytes one decode step must touch: weights outside routed experts once, the expected distinct experts of
// `sequences` tokens once, and per sequence its recurrent state (read, with the tile's share of the fold)
// and `context` latents.
double StepBytes(const Model& model, int64_t sequences, double context);

// Operations of one prompt token at a mean context of `context`: two per active weight, without the tables at
// both ends; KDA's 7 d^2 per head; attention in its expanded form.
double TokenFlops(const Model& model, double context);
// Those of them that int8 activations take as 8-bit products: in matrices of 8 bits where `weights_8bit`,
// else in MXFP4 experts.
double TokenNarrowFlops(const Model& model, bool weights_8bit);

}  // namespace deltamesh

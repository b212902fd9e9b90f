// What a decode worker's output must satisfy before any of it is relayed: a registered worker may
// still be broken or hostile, and the tokens become text and usage that clients see.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "deltamesh/mesh/mesh.pb.h"

namespace deltamesh {

// What the router knows of the request the output is for.
struct OutputLimits {
  int64_t delivered = 0;   // tokens relayed so far
  int64_t max_tokens = 0;  // at least `delivered`
  int64_t vocab = 0;       // token ids are below; 0: not known
  int64_t logprobs = -1;   // alternatives asked for with each token; -1: no scores at all
};

// INTERNAL, and what is wrong. Tokens delivered before are no error; a gap is one.
absl::Status CheckOutput(const mesh::SequenceOutput& output, const OutputLimits& limits);

}  // namespace deltamesh

// `deltamesh logits`: runs given tokens through a model in this process and writes what it computed, for
// comparing with other implementations.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/base/ids.h"

namespace deltamesh {

struct LogitsOptions {
  std::string model;  // checkpoint folder
  std::vector<TokenId> tokens;
  // How the tokens are fed: "all" in one call, "step" one by one, "chunks:5,1,7" in calls of these sizes,
  // which must add up to the number of tokens. The numbers written do not depend on it.
  std::string feed = "all";
  // .npy, float32 [positions, vocabulary].
  std::string out;
  // Also writes the state after the last token into the folder OUT.states, one float32 .npy per tensor,
  // LAYER being the 0-based layer of the model:
  //   S.LAYER       [heads, key, value]   recurrent state, open tile applied
  //   conv.LAYER    [3, taps - 1, channels]   raw inputs of q, k, v; oldest first
  //   latent.LAYER  [positions, rank]     after its norm
  //   k_rope.LAYER  [positions, rope]
  bool states = false;
  int threads = 1;
  std::string weights = "stored";     // width of matrices: stored or 8bit
  std::string activations = "float";  // inputs of narrow matrices: float or int8
  std::string packed_dir = "off";     // see PackedFolder
};

// INVALID_ARGUMENT names the flag, before the model is read where that is possible.
absl::Status RunLogits(const LogitsOptions& options);

// Call sizes of `feed` for `tokens` tokens.
absl::StatusOr<std::vector<int64_t>> ParseFeed(const std::string& feed, int64_t tokens);

}  // namespace deltamesh

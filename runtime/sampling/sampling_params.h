// How the next token is chosen. Plain data; validated where it enters the mesh.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/base/ids.h"

namespace deltamesh {

struct SamplingParams {
  float temperature = 1;         // [0, 2]; 0 is greedy
  float top_p = 1;               // (0, 1]
  int32_t top_k = 0;             // 0: no limit
  float min_p = 0;               // [0, 1]
  float repetition_penalty = 1;  // > 0; over prompt and answer
  float presence_penalty = 0;    // [-2, 2]; over the answer
  float frequency_penalty = 0;   // [-2, 2]; over the answer
  std::vector<std::pair<TokenId, float>> logit_bias;
  uint64_t seed = 0;
  int32_t logprobs = -1;  // -1: none; n: the chosen token and n alternatives
};

}  // namespace deltamesh

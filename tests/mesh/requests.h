// Requests for mesh tests, drawn from a seed.
#pragma once

#include <string>
#include <vector>

#include "runtime/base/random.h"
#include "runtime/base/status.h"
#include "services/router/router_core.h"

namespace deltamesh::testing {

inline constexpr int64_t kTestVocab = 512;  // ordinary tokens of the golden checkpoints

inline std::string Golden(const char* family) {
  return std::string(DELTAMESH_SOURCE_DIR) + "/tests/data/golden/" + family + "_tiny";
}

// Greedy for even seeds, sampled with every filter for odd ones; logprobs with two alternatives.
inline ClientRequest MakeRequest(const std::string& id, int64_t prompt, int64_t max_tokens,
                                 uint64_t seed) {
  SeededEntropy entropy(seed);
  ClientRequest request;
  request.request_id = id;
  for (int64_t i = 0; i < prompt; ++i) {
    request.prompt.push_back(static_cast<TokenId>(entropy.Next() % kTestVocab));
  }
  request.max_tokens = max_tokens;
  mesh::Sampling& sampling = request.sampling;
  const bool greedy = seed % 2 == 0;
  sampling.set_temperature(greedy ? 0.0f : 1.3f);
  sampling.set_top_p(greedy ? 1.0f : 0.95f);
  sampling.set_top_k(greedy ? 0 : 50);
  sampling.set_repetition_penalty(greedy ? 1.0f : 1.1f);
  sampling.set_frequency_penalty(greedy ? 0.0f : 0.2f);
  sampling.set_seed(seed * 77 + 5);
  sampling.set_logprobs(2);
  return request;
}

// Of the default tenant.
inline SessionCall MakeSessionCall(SessionCall::Kind kind, const std::string& name,
                                   const std::string& target = "") {
  SessionCall call;
  call.kind = kind;
  call.name = name;
  call.session = MakeSessionId("", name);
  call.target_name = target;
  if (!target.empty()) call.target = MakeSessionId("", target);
  return call;
}

}  // namespace deltamesh::testing

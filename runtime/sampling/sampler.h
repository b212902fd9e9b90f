// From the logits of one position to the next token.
//
// Order of things, each on the result of the one before:
//   1. repetition penalty r over every token of prompt and answer: l > 0 ? l / r : l * r
//   2. over tokens of the answer: l -= frequency * count + presence
//   3. l += bias. What leaves the range of float32 is clamped to it.
//   4. temperature 0: the highest l, ties to the lowest id. Done. Else w = exp((l - max) /
//      temperature)
//   5. top-k: the k highest l; on ties the lowest ids stay
//   6. min-p: w >= min_p * (highest w)
//   7. top-p: by descending l, then ascending id, the shortest prefix whose sum of w reaches top_p
//      of the sum of all w left; at least one
//   8. one uniform number u = Philox(seed, position): the first token in ascending id order whose
//      running sum of w exceeds u * (sum of w left)
// Walking ids, not ranks, makes a filter that filters nothing equal to no filter.
//
// Log-probabilities are the model's own: the log-softmax of the logits before step 1, so that they
// compare between requests with different options. Sums run in double over ascending ids.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "runtime/base/ids.h"
#include "runtime/sampling/sampling_params.h"

namespace deltamesh {

inline constexpr int32_t kLogprobsMax = 20;

// INVALID_ARGUMENT names the field, its value and the range.
absl::Status ValidateSampling(const SamplingParams& params, int64_t vocab);

// What the penalties know of a sequence. Copyable plain data.
class TokenCounts {
 public:
  void AddPrompt(std::span<const TokenId> tokens) {
    for (const TokenId t : tokens) counts_.try_emplace(t, 0);
  }
  void AddAnswer(TokenId token) { ++counts_[token]; }
  // Times in the answer, for every token of prompt or answer.
  const absl::flat_hash_map<TokenId, int64_t>& counts() const { return counts_; }

 private:
  absl::flat_hash_map<TokenId, int64_t> counts_;
};

// Whether the counts matter; without penalties they need not be kept.
bool UsesTokenCounts(const SamplingParams& params);

struct TokenSample {
  TokenId token = 0;
  float logprob = 0;                           // when params.logprobs >= 0
  std::vector<std::pair<TokenId, float>> top;  // params.logprobs of them, highest first, ties by id
};

// Holds scratch only: the same call gives the same result. Not thread-safe.
class Sampler {
 public:
  // `position` is the index in the sequence of the token to be drawn. `params` were validated.
  // DATA_LOSS when a logit is NaN or +inf, or when no token has a finite logit.
  absl::StatusOr<TokenSample> Sample(std::span<const float> logits, const SamplingParams& params,
                                     const TokenCounts& counts, int64_t position);

 private:
  void Adjust(std::span<const float> logits, const SamplingParams& params,
              const TokenCounts& counts);
  TokenId Draw(const SamplingParams& params, TokenId best, int64_t position);
  void KeepTopK(int64_t k);
  void KeepMinP(double min_p);
  void KeepTopP(double top_p);
  void AddLogprobs(std::span<const float> logits, int64_t alternatives, TokenSample& sample);

  std::vector<float> adjusted_;     // [vocab]
  std::vector<TokenId> survivors_;  // ascending ids
  std::vector<double> weights_;     // of the survivors
  std::vector<TokenId> ranked_;
};

}  // namespace deltamesh

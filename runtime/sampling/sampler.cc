#include "runtime/sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "runtime/base/random.h"
#include "runtime/base/status.h"
#include "runtime/sampling/fixed_math.h"

namespace deltamesh {
namespace {

// Highest logit first, then the lowest id: a strict order over tokens.
struct Ranks {
  const float* logits;
  bool operator()(TokenId a, TokenId b) const {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  }
};

absl::Status CheckRange(const char* field, double value, double low, bool low_open, double high) {
  const bool above = low_open ? value > low : value >= low;
  if (above && value <= high) return absl::OkStatus();  // NaN fails
  return InvalidArgument("%s: %g is outside %s%g, %g]", field, value, low_open ? "(" : "[", low,
                         high);
}

absl::Status CheckLogits(std::span<const float> logits, int64_t position) {
  bool finite = false;
  for (size_t i = 0; i < logits.size(); ++i) {
    const float l = logits[i];
    if (std::isnan(l) || l == std::numeric_limits<float>::infinity()) {
      return DataLoss(
          "logits at position %d: token %d has %g; the weights or the state are damaged", position,
          i, l);
    }
    finite |= !std::isinf(l);
  }
  if (finite) return absl::OkStatus();
  return DataLoss(
      "logits at position %d: none of %d is finite; the weights or the state are damaged", position,
      logits.size());
}

}  // namespace

absl::Status ValidateSampling(const SamplingParams& p, int64_t vocab) {
  constexpr double kMaxFloat = std::numeric_limits<float>::max();
  RETURN_IF_ERROR(CheckRange("temperature", p.temperature, 0, false, 2));
  RETURN_IF_ERROR(CheckRange("top_p", p.top_p, 0, true, 1));
  if (p.top_k < 0) return InvalidArgument("top_k: %d is negative; use 0 for no limit", p.top_k);
  RETURN_IF_ERROR(CheckRange("min_p", p.min_p, 0, false, 1));
  RETURN_IF_ERROR(CheckRange("repetition_penalty", p.repetition_penalty, 0, true, kMaxFloat));
  RETURN_IF_ERROR(CheckRange("presence_penalty", p.presence_penalty, -2, false, 2));
  RETURN_IF_ERROR(CheckRange("frequency_penalty", p.frequency_penalty, -2, false, 2));
  for (const auto& [token, bias] : p.logit_bias) {
    if (token < 0 || token >= vocab) {
      return InvalidArgument("logit_bias: token %d is outside the vocabulary of %d", token, vocab);
    }
    if (!(bias >= -100 && bias <= 100)) {
      return InvalidArgument("logit_bias: %g of token %d is outside [-100, 100]", bias, token);
    }
  }
  if (p.logprobs < -1 || p.logprobs > kLogprobsMax) {
    return InvalidArgument("logprobs: %d is outside [-1, %d]; -1 is none", p.logprobs,
                           kLogprobsMax);
  }
  return absl::OkStatus();
}

bool UsesTokenCounts(const SamplingParams& p) {
  return p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0;
}

absl::StatusOr<TokenSample> Sampler::Sample(std::span<const float> logits,
                                            const SamplingParams& params, const TokenCounts& counts,
                                            int64_t position) {
  RETURN_IF_ERROR(CheckLogits(logits, position));
  Adjust(logits, params, counts);
  const auto best = std::max_element(adjusted_.begin(), adjusted_.end());  // the first of equals
  TokenSample sample;
  sample.token = static_cast<TokenId>(best - adjusted_.begin());
  if (params.temperature > 0) sample.token = Draw(params, sample.token, position);
  if (params.logprobs >= 0) AddLogprobs(logits, params.logprobs, sample);
  return sample;
}

void Sampler::Adjust(std::span<const float> logits, const SamplingParams& params,
                     const TokenCounts& counts) {
  constexpr float kMax = std::numeric_limits<float>::max();
  adjusted_.assign(logits.begin(), logits.end());
  if (UsesTokenCounts(params)) {
    for (const auto& [token, count] : counts.counts()) {
      float& l = adjusted_[static_cast<size_t>(token)];
      if (std::isinf(l)) continue;
      l = l > 0 ? l / params.repetition_penalty : l * params.repetition_penalty;
      if (count > 0) {
        l -= params.frequency_penalty * static_cast<float>(count) + params.presence_penalty;
      }
      l = std::clamp(l, -kMax, kMax);
    }
  }
  for (const auto& [token, bias] : params.logit_bias) {
    float& l = adjusted_[static_cast<size_t>(token)];
    if (!std::isinf(l)) l = std::clamp(l + bias, -kMax, kMax);
  }
}

TokenId Sampler::Draw(const SamplingParams& params, TokenId best, int64_t position) {
  const int64_t vocab = static_cast<int64_t>(adjusted_.size());
  survivors_.resize(adjusted_.size());
  std::iota(survivors_.begin(), survivors_.end(), 0);
  if (params.top_k > 0 && params.top_k < vocab) KeepTopK(params.top_k);

  const double max = adjusted_[static_cast<size_t>(best)];
  weights_.resize(survivors_.size());
  for (size_t i = 0; i < survivors_.size(); ++i) {
    weights_[i] =
        FixedExp((adjusted_[static_cast<size_t>(survivors_[i])] - max) / params.temperature);
  }
  if (params.min_p > 0) KeepMinP(params.min_p);
  if (params.top_p < 1) KeepTopP(params.top_p);

  double total = 0;
  for (const double w : weights_) total += w;
  const double target = PhiloxUniform(params.seed, static_cast<uint64_t>(position), 0) * total;
  double sum = 0;
  for (size_t i = 0; i < survivors_.size(); ++i) {
    sum += weights_[i];
    if (sum > target) return survivors_[i];
  }
  CHECK(false, "no token for target %g of %g", target, total);
}

void Sampler::KeepTopK(int64_t k) {
  std::nth_element(survivors_.begin(), survivors_.begin() + (k - 1), survivors_.end(),
                   Ranks{adjusted_.data()});
  survivors_.resize(static_cast<size_t>(k));
  std::sort(survivors_.begin(), survivors_.end());
}

void Sampler::KeepMinP(double min_p) {
  size_t kept = 0;
  for (size_t i = 0; i < survivors_.size(); ++i) {
    if (weights_[i] < min_p) continue;  // the highest weight is exp(0) = 1
    survivors_[kept] = survivors_[i];
    weights_[kept++] = weights_[i];
  }
  survivors_.resize(kept);
  weights_.resize(kept);
}

void Sampler::KeepTopP(double top_p) {
  double total = 0;
  for (const double w : weights_) total += w;
  // A heap of places in `survivors_`: popping stops early on the peaked distributions that are
  // usual.
  const auto below = [this](TokenId a, TokenId b) {
    return Ranks{adjusted_.data()}(survivors_[static_cast<size_t>(b)],
                                   survivors_[static_cast<size_t>(a)]);
  };
  ranked_.resize(survivors_.size());
  std::iota(ranked_.begin(), ranked_.end(), 0);
  std::make_heap(ranked_.begin(), ranked_.end(), below);
  double sum = 0;
  auto end = ranked_.end();
  do {
    std::pop_heap(ranked_.begin(), end, below);
    --end;
    sum += weights_[static_cast<size_t>(*end)];
  } while (sum < top_p * total && end != ranked_.begin());

  std::sort(end, ranked_.end());
  size_t kept = 0;
  for (auto place = end; place != ranked_.end(); ++place) {
    survivors_[kept] = survivors_[static_cast<size_t>(*place)];
    weights_[kept++] = weights_[static_cast<size_t>(*place)];
  }
  survivors_.resize(kept);
  weights_.resize(kept);
}

void Sampler::AddLogprobs(std::span<const float> logits, int64_t alternatives,
                          TokenSample& sample) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double total = 0;
  for (const float l : logits) total += FixedExp(l - max);
  const double log_total = FixedLog(total);
  const auto logprob = [&](TokenId t) {
    return static_cast<float>(logits[static_cast<size_t>(t)] - max - log_total);
  };
  sample.logprob = logprob(sample.token);

  const int64_t count = std::min<int64_t>(alternatives, static_cast<int64_t>(logits.size()));
  ranked_.resize(logits.size());
  std::iota(ranked_.begin(), ranked_.end(), 0);
  std::partial_sort(ranked_.begin(), ranked_.begin() + count, ranked_.end(), Ranks{logits.data()});
  for (int64_t i = 0; i < count; ++i) {
    const TokenId t = ranked_[static_cast<size_t>(i)];
    sample.top.emplace_back(t, logprob(t));
  }
}

}  // namespace deltamesh

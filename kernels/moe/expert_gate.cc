#include <limits>

#include "hwy/base.h"
#include "kernels/base/math.h"
#include "kernels/moe/moe.h"

namespace deltamesh::kernels {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void Scores(const ExpertGateParams& p, const float* logits, float* scores) {
  if (p.sigmoid) {
    for (int64_t e = 0; e < p.experts; ++e) scores[e] = Sigmoid(logits[e]);
    return;
  }
  float largest = logits[0];
  for (int64_t e = 1; e < p.experts; ++e) largest = logits[e] > largest ? logits[e] : largest;
  float sum = 0.0f;
  for (int64_t e = 0; e < p.experts; ++e) {
    scores[e] = Exp(logits[e] - largest);
    sum += scores[e];
  }
  for (int64_t e = 0; e < p.experts; ++e) scores[e] = scores[e] / sum;
}

// Index of the largest untaken value, the lowest one among equals. NaN counts as the smallest, so
// that a damaged row still names experts that exist.
int64_t Best(const float* values, int64_t count, const bool* taken) {
  int64_t best = -1;
  float best_value = kNever;
  for (int64_t i = 0; i < count; ++i) {
    if (taken[i]) continue;
    const float value = values[i] == values[i] ? values[i] : kNever;
    if (best < 0 || value > best_value) {
      best = i;
      best_value = value;
    }
  }
  return best;
}

float TwoBest(const float* values, int64_t count) {
  float first = kNever, second = kNever;
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] > first) {
      second = first;
      first = values[i];
    } else if (values[i] > second) {
      second = values[i];
    }
  }
  return count > 1 ? first + second : first;
}

// Marks the experts of every group but the best `top_groups` as taken.
void DropGroups(const ExpertGateParams& p, const float* biased, bool* taken) {
  const int64_t size = p.experts / p.groups;
  float scores[kMaxExpertGroups];
  bool kept[kMaxExpertGroups] = {};
  for (int64_t g = 0; g < p.groups; ++g) scores[g] = TwoBest(biased + g * size, size);
  for (int64_t i = 0; i < p.top_groups; ++i) kept[Best(scores, p.groups, kept)] = true;
  for (int64_t e = 0; e < p.experts; ++e) taken[e] = !kept[e / size];
}

void GateOne(const ExpertGateParams& p, const float* logits, int32_t* ids, float* weights) {
  float scores[kMaxExperts], biased[kMaxExperts];
  bool taken[kMaxExperts] = {};
  Scores(p, logits, scores);
  for (int64_t e = 0; e < p.experts; ++e) {
    biased[e] = p.bias == nullptr ? scores[e] : scores[e] + p.bias[e];
  }
  if (p.groups > 1 && p.groups > p.top_groups) DropGroups(p, biased, taken);
  float sum = 0.0f;
  for (int64_t r = 0; r < p.top_k; ++r) {
    const int64_t e = Best(biased, p.experts, taken);
    taken[e] = true;
    ids[r] = static_cast<int32_t>(e);
    weights[r] = p.biased_weights ? biased[e] : scores[e];
    sum += weights[r];
  }
  const bool renormalize = p.renormalize && p.top_k > 1;
  for (int64_t r = 0; r < p.top_k; ++r) {
    if (renormalize) weights[r] = weights[r] / (sum + 1e-20f);
    weights[r] = weights[r] * p.scale;
  }
}

}  // namespace

void ExpertGate(const ExpertGateParams& p) {
  HWY_ASSERT(p.experts >= 1 && p.experts <= kMaxExperts && p.top_k <= p.experts);
  HWY_ASSERT(p.groups <= 1 || (p.groups <= kMaxExpertGroups && p.experts % p.groups == 0 &&
                               p.top_k <= p.experts / p.groups * p.top_groups));
  for (int64_t t = 0; t < p.tokens; ++t) {
    GateOne(p, p.logits + t * p.experts, p.ids + t * p.top_k, p.weights + t * p.top_k);
  }
}

}  // namespace deltamesh::kernels

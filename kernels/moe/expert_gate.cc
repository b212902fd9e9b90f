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

// The `count` largest values among those not dropped, in descending order, the lower index first among
// equals. NaN counts as the smallest, so that a damaged row still names experts that exist.
void Largest(const float* values, int64_t size, const bool* dropped, int64_t count, int32_t* ids) {
  float best[kMaxExperts];
  int64_t found = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (dropped[i]) continue;
    const float value = values[i] == values[i] ? values[i] : kNever;
    if (found == count && !(value > best[count - 1])) continue;
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && value > best[at - 1]; --at) {
      best[at] = best[at - 1];
      ids[at] = ids[at - 1];
    }
    best[at] = value;
    ids[at] = static_cast<int32_t>(i);
  }
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

// Drops the experts of every group but the best `top_groups`.
void DropGroups(const ExpertGateParams& p, const float* biased, bool* dropped) {
  const int64_t size = p.experts / p.groups;
  float scores[kMaxExpertGroups];
  const bool none[kMaxExpertGroups] = {};
  int32_t kept[kMaxExpertGroups];
  for (int64_t g = 0; g < p.groups; ++g) scores[g] = TwoBest(biased + g * size, size);
  Largest(scores, p.groups, none, p.top_groups, kept);
  for (int64_t e = 0; e < p.experts; ++e) dropped[e] = true;
  for (int64_t i = 0; i < p.top_groups; ++i) {
    for (int64_t e = 0; e < size; ++e) dropped[kept[i] * size + e] = false;
  }
}

void GateOne(const ExpertGateParams& p, const float* logits, int32_t* ids, float* weights) {
  float scores[kMaxExperts], biased[kMaxExperts];
  bool dropped[kMaxExperts];
  Scores(p, logits, scores);
  for (int64_t e = 0; e < p.experts; ++e) {
    biased[e] = p.bias == nullptr ? scores[e] : scores[e] + p.bias[e];
    dropped[e] = false;
  }
  if (p.groups > 1 && p.groups > p.top_groups) DropGroups(p, biased, dropped);
  Largest(biased, p.experts, dropped, p.top_k, ids);
  float sum = 0.0f;
  for (int64_t r = 0; r < p.top_k; ++r) {
    weights[r] = p.biased_weights ? biased[ids[r]] : scores[ids[r]];
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

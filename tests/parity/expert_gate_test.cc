#include <algorithm>
#include <limits>
#include <numeric>

#include "kernels/moe/moe.h"
#include "tests/parity/common.h"

namespace deltamesh::kernels {
namespace {

struct Chosen {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

ExpertGateParams Plain(int64_t tokens, int64_t experts, int64_t top_k) {
  return {.logits = nullptr,
          .bias = nullptr,
          .tokens = tokens,
          .experts = experts,
          .top_k = top_k,
          .groups = 1,
          .top_groups = 1,
          .sigmoid = true,
          .renormalize = true,
          .biased_weights = false,
          .scale = 1.0f,
          .ids = nullptr,
          .weights = nullptr};
}

Chosen Gate(ExpertGateParams p, const std::vector<float>& logits, const std::vector<float>& bias) {
  Chosen c = {std::vector<int32_t>(static_cast<size_t>(p.tokens * p.top_k), -1),
              std::vector<float>(static_cast<size_t>(p.tokens * p.top_k), -1.0f)};
  p.logits = logits.data();
  p.bias = bias.empty() ? nullptr : bias.data();
  p.ids = c.ids.data();
  p.weights = c.weights.data();
  ExpertGate(p);
  return c;
}

// The definition, in float64 and by sorting.
struct Oracle {
  std::vector<int32_t> ids;
  std::vector<double> weights;
};

Oracle Define(const ExpertGateParams& p, const float* logits, const std::vector<float>& bias) {
  std::vector<double> s(static_cast<size_t>(p.experts)), pick;
  double most = logits[0], total = 0;
  for (int64_t e = 1; e < p.experts; ++e) most = std::max<double>(most, logits[e]);
  for (size_t e = 0; e < s.size(); ++e) {
    s[e] = p.sigmoid ? 1 / (1 + std::exp(-static_cast<double>(logits[e])))
                     : std::exp(logits[e] - most);
    total += s[e];
  }
  if (!p.sigmoid) {
    for (double& v : s) v /= total;
  }
  pick = s;
  if (!bias.empty()) {
    for (size_t e = 0; e < s.size(); ++e) pick[e] += bias[e];
  }
  const std::vector<double> biased = pick;
  if (p.groups > 1 && p.groups > p.top_groups) {
    const int64_t size = p.experts / p.groups;
    std::vector<std::pair<double, int64_t>> groups;
    for (int64_t g = 0; g < p.groups; ++g) {
      std::vector<double> of(pick.begin() + g * size, pick.begin() + (g + 1) * size);
      std::sort(of.rbegin(), of.rend());
      groups.push_back({-(of[0] + (size > 1 ? of[1] : 0.0)), g});
    }
    std::sort(groups.begin(), groups.end());
    for (size_t i = static_cast<size_t>(p.top_groups); i < groups.size(); ++i) {
      std::fill_n(pick.begin() + groups[i].second * size, size,
                  -std::numeric_limits<double>::infinity());
    }
  }
  std::vector<int32_t> order(s.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return pick[static_cast<size_t>(a)] > pick[static_cast<size_t>(b)];
  });
  Oracle o;
  double sum = 0;
  for (int64_t r = 0; r < p.top_k; ++r) {
    const size_t e = static_cast<size_t>(order[static_cast<size_t>(r)]);
    o.ids.push_back(static_cast<int32_t>(e));
    o.weights.push_back(p.biased_weights ? biased[e] : s[e]);
    sum += o.weights.back();
  }
  for (double& w : o.weights) {
    if (p.renormalize && p.top_k > 1) w /= sum + 1e-20;
    w *= p.scale;
  }
  return o;
}

// Random logits are far from ties (asserted by the ids agreeing), so the choice must be the oracle's and the
// weights differ by the score's 3 ulp (6 u), top_k u for the sum, and a few for the rest; with a bias in the
// weights its absolute rounding counts, which the last term allows for.
TEST(ExpertGate, AgreesWithTheDefinition) {
  Random random(61);
  for (auto [experts, groups, top_groups] : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1},
                                             {2, 1, 1},
                                             {7, 1, 1},
                                             {12, 3, 2},
                                             {12, 12, 5},
                                             {64, 8, 3},
                                             {256, 8, 4},
                                             {896, 1, 1},
                                             {896, 1, 1}}) {
    for (int64_t top_k : {1, 2, 4, 8, 16}) {
      if (top_k > experts / groups * top_groups) continue;
      for (int mask = 0; mask < 16; ++mask) {
        ExpertGateParams p = Plain(4, experts, top_k);
        p.groups = groups;
        p.top_groups = top_groups;
        p.sigmoid = mask & 1;
        p.renormalize = mask & 2;
        p.biased_weights = mask & 4;
        p.scale = 2.446f;
        const std::vector<float> logits = random.Normal(p.tokens * experts, 2.0f);
        const std::vector<float> bias =
            mask & 8 ? random.Normal(experts, 0.2f) : std::vector<float>();
        const Chosen got = Gate(p, logits, bias);
        for (int64_t t = 0; t < p.tokens; ++t) {
          const Oracle want = Define(p, logits.data() + t * experts, bias);
          for (int64_t r = 0; r < top_k; ++r) {
            const size_t i = static_cast<size_t>(t * top_k + r);
            ASSERT_EQ(got.ids[i], want.ids[static_cast<size_t>(r)]) << experts << " mask " << mask;
            const double w = want.weights[static_cast<size_t>(r)];
            const double softmax = p.sigmoid ? 0 : static_cast<double>(experts) + 20;
            double tolerance = (12 + static_cast<double>(top_k) + softmax) * kUnit * std::fabs(w);
            // Biased weights can nearly cancel in their sum.
            if (p.biased_weights) tolerance = 1e-4 * (1 + std::fabs(w));
            ASSERT_NEAR(got.weights[i], w, tolerance) << experts << " mask " << mask;
          }
        }
      }
    }
  }
}

TEST(ExpertGate, TiesGoToTheLowestIndexInOrder) {
  const std::vector<float> logits = {0.5f, 1.0f, 1.0f, 0.25f, 1.0f, 0.5f};
  EXPECT_EQ(Gate(Plain(1, 6, 5), logits, {}).ids, (std::vector<int32_t>{1, 2, 4, 0, 5}));
  const Chosen equal = Gate(Plain(1, 6, 6), std::vector<float>(6, 0.0f), {});
  EXPECT_EQ(equal.ids, (std::vector<int32_t>{0, 1, 2, 3, 4, 5}));
  for (float w : equal.weights) EXPECT_EQ(w, 0.5f / 3.0f);
}

TEST(ExpertGate, GroupTiesGoToTheLowestGroup) {
  ExpertGateParams p = Plain(1, 6, 3);
  p.groups = 3;
  p.top_groups = 2;
  // Groups 0 and 2 tie below group 1.
  const Chosen c = Gate(p, {0.0f, 1.0f, 2.0f, 0.5f, 1.0f, 0.0f}, {});
  EXPECT_EQ(c.ids, (std::vector<int32_t>{2, 1, 3}));
}

TEST(ExpertGate, BiasSelectsButDoesNotWeigh) {
  const std::vector<float> logits = {0.0f, 0.0f, 3.0f};
  const std::vector<float> bias = {0.0f, 5.0f, 0.0f};
  ExpertGateParams p = Plain(1, 3, 1);
  Chosen c = Gate(p, logits, bias);
  EXPECT_EQ(c.ids[0], 1);
  EXPECT_EQ(c.weights[0], 0.5f);
  p.biased_weights = true;
  EXPECT_EQ(Gate(p, logits, bias).weights[0], 5.5f);
}

TEST(ExpertGate, OneExpertIsNotRenormalised) {
  const Chosen c = Gate(Plain(2, 1, 1), {0.0f, 1.0f}, {});
  EXPECT_EQ(c.ids, (std::vector<int32_t>{0, 0}));
  EXPECT_EQ(c.weights[0], 0.5f);
  EXPECT_LT(c.weights[1], 0.74f);
}

TEST(ExpertGate, NamesExistingExpertsEvenForNaN) {
  const float nan = std::nanf("");
  EXPECT_EQ(Gate(Plain(1, 4, 3), {nan, 1.0f, nan, 2.0f}, {}).ids, (std::vector<int32_t>{3, 1, 0}));
  EXPECT_EQ(Gate(Plain(1, 3, 3), {nan, nan, nan}, {}).ids, (std::vector<int32_t>{0, 1, 2}));
}

}  // namespace
}  // namespace deltamesh::kernels

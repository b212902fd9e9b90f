#include "runtime/sampling/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "runtime/base/random.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

std::vector<float> RandomLogits(Entropy& entropy, int64_t vocab, float scale) {
  std::vector<float> l(static_cast<size_t>(vocab));
  // Few distinct values, so that ties are common.
  for (float& v : l) v = static_cast<float>(entropy.Next() % 41) / 20 * scale - scale;
  return l;
}

TokenId Pick(const std::vector<float>& logits, const SamplingParams& p, int64_t position = 0,
             const TokenCounts& counts = {}) {
  Sampler sampler;
  const auto s = sampler.Sample(logits, p, counts, position);
  EXPECT_TRUE(s.ok()) << s.status();
  return s.ok() ? s->token : -1;
}

// The eight steps by brute force, with the C library's exp: a probability for every token.
std::vector<double> TwinProbabilities(const std::vector<float>& logits, const SamplingParams& p,
                                      const std::vector<TokenId>& prompt,
                                      const std::vector<TokenId>& answer) {
  const size_t n = logits.size();
  std::vector<double> l(logits.begin(), logits.end());
  for (size_t t = 0; t < n; ++t) {
    const auto times = [&](const std::vector<TokenId>& v) {
      return std::count(v.begin(), v.end(), static_cast<TokenId>(t));
    };
    if (times(prompt) + times(answer) > 0) {
      l[t] = l[t] > 0 ? l[t] / p.repetition_penalty : l[t] * p.repetition_penalty;
    }
    l[t] -= p.frequency_penalty * static_cast<double>(times(answer));
    if (times(answer) > 0) l[t] -= p.presence_penalty;
    for (const auto& [token, bias] : p.logit_bias) {
      if (token == static_cast<TokenId>(t)) l[t] += bias;
    }
    l[t] = static_cast<float>(l[t]);  // equal logits stay equal
  }
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return l[a] > l[b]; });
  if (p.top_k > 0) order.resize(std::min<size_t>(n, static_cast<size_t>(p.top_k)));
  std::vector<double> w(n, 0.0);
  for (const size_t t : order) w[t] = std::exp((l[t] - l[order[0]]) / p.temperature);
  while (w[order.back()] < p.min_p) order.pop_back();
  double total = 0, sum = 0;
  for (const size_t t : order) total += w[t];
  std::vector<double> kept(n, 0.0);
  for (const size_t t : order) {
    kept[t] = w[t];
    sum += w[t];
    if (sum >= p.top_p * total) break;
  }
  const double all = std::accumulate(kept.begin(), kept.end(), 0.0);
  for (double& k : kept) k /= all;
  return kept;
}

TEST(Sampler, EqualsBruteForceTwin) {
  SeededEntropy entropy(11);
  Sampler sampler;
  int checked = 0;
  for (int round = 0; round < 3000; ++round) {
    const int64_t vocab = 1 + static_cast<int64_t>(entropy.Next() % 90);
    const auto logits = RandomLogits(entropy, vocab, 4);
    const auto pick = [&](std::initializer_list<float> values) {
      return values.begin()[entropy.Next() % values.size()];
    };
    SamplingParams p;
    p.temperature = pick({0.3f, 1.0f, 2.0f});
    p.top_k = static_cast<int32_t>(pick({0, 1, 5, 200}));
    p.min_p = pick({0, 0.02f, 0.31f, 1});
    p.top_p = pick({1, 0.9f, 0.47f, 0.001f});
    p.repetition_penalty = pick({1, 1.3f, 0.5f});
    p.presence_penalty = pick({0, 0.7f, -2});
    p.frequency_penalty = pick({0, 0.3f, -0.6f});
    p.seed = entropy.Next();
    std::vector<TokenId> prompt, answer;
    for (int i = 0; i < 6; ++i) {
      prompt.push_back(static_cast<TokenId>(entropy.Next() % static_cast<uint64_t>(vocab)));
      answer.push_back(static_cast<TokenId>(entropy.Next() % static_cast<uint64_t>(vocab)));
    }
    if (round % 3 == 0) p.logit_bias = {{prompt[0], 1.5f}, {answer[0], -100.0f}};
    TokenCounts counts;
    counts.AddPrompt(prompt);
    for (const TokenId t : answer) counts.AddAnswer(t);

    const auto prob = TwinProbabilities(logits, p, prompt, answer);
    const int64_t position = static_cast<int64_t>(entropy.Next() % 100000);
    const double u = PhiloxUniform(p.seed, static_cast<uint64_t>(position), 0);
    double below = 0;
    size_t want = 0;
    while (want + 1 < prob.size() && below + prob[want] <= u) below += prob[want++];
    // Where the twin's own rounding could decide (float penalties, sums), there is nothing to
    // compare.
    if (u - below < 1e-9 || below + prob[want] - u < 1e-9) continue;
    ++checked;
    const auto got = sampler.Sample(logits, p, counts, position);
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_EQ(got->token, static_cast<TokenId>(want)) << "round " << round;
  }
  EXPECT_GT(checked, 2900);
}

TEST(Sampler, FrequenciesFollowTheProbabilities) {
  const std::vector<float> logits = {0.5f, 1.0f, -1.0f, 2.0f, 0.0f, 1.0f, -3.0f, 0.25f};
  SamplingParams p;
  p.temperature = 0.8f;
  p.seed = 20240607;
  const auto prob = TwinProbabilities(logits, p, {}, {});
  constexpr int kDraws = 40000;
  std::map<TokenId, int> seen;
  Sampler sampler;
  for (int i = 0; i < kDraws; ++i) ++seen[sampler.Sample(logits, p, {}, i)->token];
  double chi = 0;
  for (size_t t = 0; t < logits.size(); ++t) {
    const double want = prob[t] * kDraws;
    const double d = seen[static_cast<TokenId>(t)] - want;
    chi += d * d / want;
  }
  EXPECT_LT(chi, 24.3);  // 7 degrees of freedom: exceeded by one seed in a thousand
  EXPECT_GT(chi, 0.6);   // and a sequence that is too even is as suspicious
}

TEST(Sampler, GreedyTakesTheLowestOfTies) {
  SamplingParams p;
  p.temperature = 0;
  EXPECT_EQ(Pick({1, 3, 2, 3, 3}, p), 1);
  EXPECT_EQ(Pick({-INFINITY, -5}, p), 1);
}

TEST(Sampler, FiltersThatKeepOneTokenAreGreedy) {
  SeededEntropy entropy(3);
  for (int round = 0; round < 200; ++round) {
    const auto logits = RandomLogits(entropy, 50, 3);
    SamplingParams greedy, k1, p_small, m1;
    greedy.temperature = 0;
    k1.top_k = 1;
    p_small.top_p = 1e-6f;
    k1.seed = p_small.seed = entropy.Next();
    const TokenId want = Pick(logits, greedy);
    EXPECT_EQ(Pick(logits, k1, round), want);
    EXPECT_EQ(Pick(logits, p_small, round), want);
    m1.min_p = 1;  // keeps every token as likely as the best
    EXPECT_EQ(logits[static_cast<size_t>(Pick(logits, m1, round))],
              logits[static_cast<size_t>(want)]);
  }
}

TEST(Sampler, FiltersThatFilterNothingChangeNothing) {
  SeededEntropy entropy(4);
  for (int round = 0; round < 300; ++round) {
    const auto logits = RandomLogits(entropy, 64, 2);
    SamplingParams plain, open;
    plain.seed = open.seed = entropy.Next();
    open.top_k = round % 2 == 0 ? 64 : 1000;
    open.min_p = 1e-12f;
    open.top_p = 0.99999994f;
    EXPECT_EQ(Pick(logits, plain, round), Pick(logits, open, round));
  }
}

TEST(Sampler, DependsOnSeedAndPositionOnly) {
  SeededEntropy entropy(5);
  const auto logits = RandomLogits(entropy, 200, 1);
  SamplingParams a, b;
  a.seed = 1;
  b.seed = 2;
  int moved = 0, reseeded = 0;
  for (int position = 0; position < 100; ++position) {
    EXPECT_EQ(Pick(logits, a, position), Pick(logits, a, position));
    moved += Pick(logits, a, position) != Pick(logits, a, position + 1);
    reseeded += Pick(logits, a, position) != Pick(logits, b, position);
  }
  EXPECT_GT(moved, 90);
  EXPECT_GT(reseeded, 90);
}

TEST(Sampler, BiasBansAndForces) {
  SeededEntropy entropy(6);
  const auto logits = RandomLogits(entropy, 30, 2);
  SamplingParams p;
  p.logit_bias = {{7, 100}};
  for (int i = 0; i < 50; ++i) EXPECT_EQ(Pick(logits, p, i), 7);
  p.temperature = 0;
  p.logit_bias = {};
  const TokenId best = Pick(logits, p);
  p.logit_bias = {{best, -100}};
  EXPECT_NE(Pick(logits, p), best);
}

TEST(Sampler, LogprobsAreTheModelsOwn) {
  const std::vector<float> logits = {0.5f, 3.0f, 1.0f, 3.0f};
  SamplingParams p;
  p.temperature = 0;
  p.logprobs = 3;
  p.logit_bias = {{2, 50}};  // changes the choice, not the log-probabilities
  Sampler sampler;
  const auto s = sampler.Sample(logits, p, {}, 0);
  ASSERT_TRUE(s.ok());
  EXPECT_EQ(s->token, 2);
  double total = 0;
  for (const float l : logits) total += std::exp(static_cast<double>(l));
  EXPECT_FLOAT_EQ(s->logprob, static_cast<float>(1.0 - std::log(total)));
  ASSERT_EQ(s->top.size(), 3u);
  EXPECT_EQ(s->top[0].first, 1);
  EXPECT_EQ(s->top[1].first, 3);
  EXPECT_EQ(s->top[2].first, 2);
  EXPECT_FLOAT_EQ(s->top[0].second, static_cast<float>(3.0 - std::log(total)));
  p.logprobs = 20;
  EXPECT_EQ(sampler.Sample(logits, p, {}, 0)->top.size(), 4u);
}

TEST(Sampler, DamagedLogitsNeverBecomeAToken) {
  Sampler sampler;
  SamplingParams greedy;
  greedy.temperature = 0;
  for (const SamplingParams& p : {greedy, SamplingParams()}) {
    for (const std::vector<float>& logits : {std::vector<float>{1, NAN, 2},
                                             {NAN, NAN, NAN},
                                             {1, INFINITY, 0},
                                             {-INFINITY, -INFINITY}}) {
      EXPECT_EQ(sampler.Sample(logits, p, {}, 9).status().code(), absl::StatusCode::kDataLoss);
    }
  }
}

TEST(Sampler, ExtremeButValidParametersStayFinite) {
  SamplingParams p;
  p.temperature = 1e-30f;
  p.repetition_penalty = 1e-38f;
  TokenCounts counts;
  counts.AddPrompt(std::vector<TokenId>{0, 2});
  EXPECT_EQ(Pick({20, 30, 20}, p, 0, counts) % 2, 0);
  p.repetition_penalty = 3e38f;
  EXPECT_EQ(Pick({-20, -30, -20}, p, 0, counts), 1);
}

TEST(ValidateSampling, NamesTheField) {
  const auto refused = [](auto change, const char* field) {
    SamplingParams p;
    change(p);
    const absl::Status s = ValidateSampling(p, 100);
    EXPECT_EQ(s.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_THAT(std::string(s.message()), HasSubstr(field));
  };
  refused([](auto& p) { p.temperature = -0.1f; }, "temperature");
  refused([](auto& p) { p.temperature = NAN; }, "temperature");
  refused([](auto& p) { p.temperature = 2.1f; }, "temperature");
  refused([](auto& p) { p.top_p = 0; }, "top_p");
  refused([](auto& p) { p.top_p = 1.01f; }, "top_p");
  refused([](auto& p) { p.top_k = -1; }, "top_k");
  refused([](auto& p) { p.min_p = 1.5f; }, "min_p");
  refused([](auto& p) { p.repetition_penalty = 0; }, "repetition_penalty");
  refused([](auto& p) { p.repetition_penalty = INFINITY; }, "repetition_penalty");
  refused([](auto& p) { p.presence_penalty = 3; }, "presence_penalty");
  refused([](auto& p) { p.frequency_penalty = -3; }, "frequency_penalty");
  refused([](auto& p) { p.logit_bias = {{100, 0.0f}}; }, "logit_bias");
  refused([](auto& p) { p.logit_bias = {{-1, 0.0f}}; }, "logit_bias");
  refused([](auto& p) { p.logit_bias = {{1, NAN}}; }, "logit_bias");
  refused([](auto& p) { p.logprobs = 21; }, "logprobs");
  EXPECT_TRUE(ValidateSampling(SamplingParams(), 100).ok());
}

}  // namespace
}  // namespace deltamesh

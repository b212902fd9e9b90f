// The exactness law for a state that was not computed here: whatever place it comes from, a prompt that goes
// on from it with a tail of any length on the block grid has the bits of a cold run alone, also when others
// are in its batch.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/sampling/sampler.h"
#include "tests/unit/engine/engine_fixture.h"

namespace deltamesh::testing {

// Tokens, end and the bits of every log-probability, each of which has the sum over all logits in it.
inline bool SameBits(const Result& a, const Result& b) {
  const auto same = [](float x, float y) {
    return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
  };
  return a.tokens == b.tokens && a.finish == b.finish && a.error == b.error &&
         std::equal(a.logprobs.begin(), a.logprobs.end(), b.logprobs.begin(), b.logprobs.end(),
                    same) &&
         std::equal(a.top.begin(), a.top.end(), b.top.begin(), b.top.end(),
                    [&](const auto& x, const auto& y) {
                      return x.first == y.first && same(x.second, y.second);
                    });
}

// Starts a prompt on the engine under test with kLogprobsMax log-probabilities beside each token's, and sees
// that `restored` of its positions were not computed.
using StartPrompt = std::function<SequenceId(const std::vector<TokenId>& prompt, int64_t max_tokens,
                                             int64_t restored)>;

// Goes on from `head`, which the engine finds where the test has put it, with every tail of 1 to 64 tokens:
// four of them join one after the other a stranger, who is there from before the first to after the last.
inline void ExpectEveryTailInCompany(const std::string& family, EngineUnderTest& t,
                                     const std::vector<TokenId>& head, const StartPrompt& start) {
  constexpr int64_t kTails = 64, kTogether = 4, kGroups = kTails / kTogether, kVocabulary = 768;
  EngineUnderTest cold(family);
  const auto alone = [&](const std::vector<TokenId>& prompt, int64_t max_tokens) {
    SequenceSpec spec = GreedySpec(prompt, max_tokens);
    spec.sampling.logprobs = kLogprobsMax;
    const SequenceId id = cold.Add(std::move(spec));
    cold.RunAll();
    EXPECT_FALSE(cold.results[id].logprobs.empty());
    return cold.results[id];
  };
  for (int64_t group = 0; group < kGroups; ++group) {
    struct Started {
      std::vector<TokenId> prompt;
      int64_t max_tokens;
      SequenceId id;
    };
    std::vector<Started> all;
    const auto begin = [&](std::vector<TokenId> prompt, int64_t max_tokens, int64_t restored) {
      const SequenceId id = start(prompt, max_tokens, restored);
      all.push_back({std::move(prompt), max_tokens, id});
      t.Step();
    };
    const auto runs = [&](const Started& s) {
      return t.results[s.id].finish == FinishKind::kRunning;
    };
    begin(RandomPrompt(1000 + static_cast<uint64_t>(group), 40 + group * 7, kVocabulary), 40, 0);
    for (int64_t tail = group + 1; tail <= kTails; tail += kGroups) {
      std::vector<TokenId> prompt = head;
      const auto more = RandomPrompt(100 + static_cast<uint64_t>(tail), tail, kVocabulary);
      prompt.insert(prompt.end(), more.begin(), more.end());
      begin(std::move(prompt), 3, static_cast<int64_t>(head.size()));
    }
    while (std::any_of(all.begin() + 1, all.end(), runs)) ASSERT_GE(t.Step().sequences, 2);
    EXPECT_TRUE(runs(all[0])) << "the stranger left before the others";
    t.RunAll();
    for (const Started& s : all) {
      EXPECT_TRUE(SameBits(t.results[s.id], alone(s.prompt, s.max_tokens)))
          << s.prompt.size() << " tokens";
    }
  }
}

}  // namespace deltamesh::testing

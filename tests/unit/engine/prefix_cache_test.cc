// A restored prefix against a cold run: bits, for every tail length, in company, in every way of cutting.
#include "runtime/cache/prefix_cache.h"

#include <gtest/gtest.h>

#include "runtime/model/state_view.h"
#include "runtime/prefix/prefix_hash.h"
#include "tests/unit/engine/engine_fixture.h"
#include "tests/unit/engine/every_tail.h"

namespace deltamesh {
namespace {

using testing::EngineUnderTest;
using testing::GreedySpec;
using testing::RandomPrompt;
using testing::Result;

constexpr int64_t kVocab = 768;

std::vector<PrefixKey> PathOf(const std::vector<TokenId>& prompt) {
  PrefixChain chain("model", "salt");
  chain.Append(prompt);
  return chain.keys();
}

// The blocks before the last token.
std::vector<PrefixKey> ReachablePath(const std::vector<TokenId>& prompt) {
  std::vector<PrefixKey> path = PathOf(prompt);
  path.resize((prompt.size() - 1) / kBlockTokens);
  return path;
}

SequenceSpec Watched(std::vector<TokenId> prompt, int64_t max_tokens = 6) {
  SequenceSpec spec = GreedySpec(std::move(prompt), max_tokens);
  spec.sampling.logprobs = kLogprobsMax;
  return spec;
}

Result Cold(const char* family, const std::vector<TokenId>& prompt, int64_t max_tokens = 6) {
  EngineUnderTest t(family);
  const SequenceId id = t.Add(Watched(prompt, max_tokens));
  t.RunAll();
  return t.results[id];
}

class PrefixCacheTest : public ::testing::TestWithParam<const char*> {
 protected:
  PrefixCacheTest() : t_(GetParam(), Options()), cache_(MakeCache(int64_t{64} << 20)) {}

  static EngineOptions Options() {
    EngineOptions options;
    options.chunk_tokens_max = 100;
    options.step_tokens_max = 150;
    return options;
  }
  std::unique_ptr<PrefixCache> MakeCache(int64_t bytes) {
    return *PrefixCache::Create({.bytes_max = bytes, .plan = {}}, t_.engine->pools());
  }

  // Starts a prompt from what the cache has, keeping snapshots as the cache plans them.
  SequenceId Start(const std::vector<TokenId>& prompt, int64_t max_tokens = 6,
                   std::vector<int64_t> breakpoints = {}) {
    const absl::Time now = absl::FromUnixSeconds(++second_);
    const std::vector<PrefixKey> path = ReachablePath(prompt);
    const PrefixMatch match = cache_->Find(path);
    SequenceSpec spec = Watched(prompt, max_tokens);
    spec.state = *cache_->Restore(path, now);
    restored_ = spec.state == nullptr ? 0 : spec.state->position();
    std::map<int64_t, SnapshotKind> kinds;
    for (const CutPoint& cut : cache_->Plan(path, match, {.breakpoints = breakpoints})) {
      spec.cuts.push_back(cut.blocks * kBlockTokens);
      kinds[cut.blocks] = cut.kind;
    }
    spec.at_cut = [this, path, kinds, now](const SequenceState& state) {
      const SnapshotKind kind = kinds.at(state.position() / kBlockTokens);
      EXPECT_TRUE(cache_->Keep(path, state, {.kind = kind}, now));
    };
    return t_.Add(std::move(spec));
  }
  Result Run(const std::vector<TokenId>& prompt, int64_t max_tokens = 6) {
    const SequenceId id = Start(prompt, max_tokens);
    t_.RunAll();
    return t_.results[id];
  }

  EngineUnderTest t_;
  std::unique_ptr<PrefixCache> cache_;
  int64_t restored_ = 0;
  int64_t second_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Families, PrefixCacheTest,
                         ::testing::Values("kimi_k3_tiny", "kimi_linear_tiny"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(PrefixCacheTest, EveryTailLengthEqualsAColdRun) {
  const std::vector<TokenId> shared = RandomPrompt(1, 256, kVocab);
  Run(shared);
  EXPECT_EQ(restored_, 0);
  for (int64_t tail = 1; tail <= 64; ++tail) {
    std::vector<TokenId> prompt(shared.begin(), shared.begin() + 192);
    const std::vector<TokenId> more = RandomPrompt(100 + static_cast<uint64_t>(tail), tail, kVocab);
    prompt.insert(prompt.end(), more.begin(), more.end());
    const Result warm = Run(prompt);
    EXPECT_EQ(restored_, 192) << tail;
    EXPECT_EQ(warm, Cold(GetParam(), prompt)) << tail;
  }
  cache_->Clear();
  t_.ExpectBaseline();
}

TEST_P(PrefixCacheTest, EveryTailLengthInCompanyEqualsAColdRunAlone) {
  const std::vector<TokenId> head = RandomPrompt(1, 192, kVocab);
  Run(RandomPrompt(1, 200, kVocab));
  testing::ExpectEveryTailInCompany(
      GetParam(), t_, head,
      [this](const std::vector<TokenId>& prompt, int64_t max_tokens, int64_t restored) {
        const SequenceId id = Start(prompt, max_tokens);
        EXPECT_EQ(restored_, restored) << prompt.size();
        return id;
      });
  cache_->Clear();
  t_.ExpectBaseline();
}

TEST_P(PrefixCacheTest, TheSamePromptTwiceComputesAtMostABlock) {
  for (const int64_t tokens : {65, 128, 129, 300, 449}) {
    const std::vector<TokenId> prompt = RandomPrompt(static_cast<uint64_t>(tokens), tokens, kVocab);
    const Result first = Run(prompt);
    const Result second = Run(prompt);
    EXPECT_EQ(second, first);
    EXPECT_GT(restored_, 0);
    EXPECT_LE(tokens - restored_, 64) << tokens;
  }
}

TEST_P(PrefixCacheTest, RestoredSequencesInABatchEqualColdOnes) {
  const std::vector<TokenId> shared = RandomPrompt(7, 200, kVocab);
  Run(shared);
  std::vector<std::vector<TokenId>> prompts;
  for (const int64_t tail : {1, 5, 40, 64, 130}) {
    std::vector<TokenId> prompt(shared.begin(), shared.begin() + 192);
    const auto more = RandomPrompt(static_cast<uint64_t>(tail), tail, kVocab);
    prompt.insert(prompt.end(), more.begin(), more.end());
    prompts.push_back(prompt);
  }
  prompts.push_back(RandomPrompt(9, 77, kVocab));  // a stranger among them
  std::vector<SequenceId> ids;
  for (const auto& prompt : prompts) {
    ids.push_back(Start(prompt));
    t_.Step();  // they join one after the other
  }
  t_.RunAll();
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(t_.results[ids[i]], Cold(GetParam(), prompts[i])) << i;
  }
}

// What a state says at each call.
std::vector<std::vector<float>> Everything(const SequenceState& state) {
  std::vector<std::vector<float>> all;
  for (int64_t layer = 0; layer < state.layout().kda_layers; ++layer) {
    all.push_back(RecurrentState(state, layer));
    all.push_back(ConvTails(state, layer));
  }
  all.push_back(Latents(state, 0));
  return all;
}

// The copy that a step makes at a cut is the state of a step that ends there, and spares one.
TEST_P(PrefixCacheTest, ACutCostsAStepOnlyWhereNoOtherSlabIsFree) {
  const std::vector<TokenId> prompt = RandomPrompt(31, 64 + 10, kVocab);
  std::vector<std::vector<float>> first;
  for (const int64_t slabs : {1, 2}) {
    EngineOptions options = Options();
    options.slabs = slabs;
    EngineUnderTest t(GetParam(), options);
    std::vector<std::vector<float>> seen;
    SequenceSpec spec = Watched(prompt, 1);
    spec.cuts = {64};
    spec.at_cut = [&](const SequenceState& state) {
      ASSERT_EQ(state.position(), 64);
      ASSERT_EQ(state.blocks().size(), slabs == 1 ? 2u : 1u);
      seen = Everything(state);
    };
    const SequenceId id = t.Add(std::move(spec));
    int64_t steps = 0;
    for (; t.engine->HasWork(); ++steps) t.Step();
    EXPECT_EQ(steps, slabs == 1 ? 2 : 1);
    EXPECT_EQ(t.results[id], Cold(GetParam(), prompt, 1));
    if (slabs == 1) first = seen;
    EXPECT_EQ(seen, first) << slabs;
    t.ExpectBaseline();
  }
}

// Cuts in every place of a step - passed, at its end, both - of prompts that begin anywhere, beside others:
// each is called once, in order, with the state that a prefill up to there has.
TEST_P(PrefixCacheTest, PassedCutsInCompanyHaveTheStateOfAPrefillThatEndsThere) {
  const std::vector<TokenId> words = RandomPrompt(32, 460, kVocab);
  std::map<int64_t, std::vector<std::vector<float>>> alone;
  for (int64_t blocks = 1; blocks <= 7; ++blocks) {
    EngineUnderTest t(GetParam(), Options());
    SequenceSpec spec = Watched(words, 1);
    spec.stop_at = 64 * blocks;
    const SequenceId id = t.Add(std::move(spec));
    t.RunAll();
    alone[64 * blocks] = Everything(*t.engine->state(id));
  }
  EngineOptions options = Options();
  options.chunk_tokens_max = 200;
  options.step_tokens_max = 420;
  EngineUnderTest t(GetParam(), options);
  const SequenceId stream = t.Add(Watched(RandomPrompt(33, 30, kVocab), 40));
  std::vector<std::vector<int64_t>> wanted, called(4);
  std::vector<SequenceId> ids;
  for (size_t i = 0; i < called.size(); ++i) {
    const bool prefill = i == 3;
    SequenceSpec spec = Watched(words, 1);
    if (prefill) spec.stop_at = 448;
    wanted.push_back(i == 0 ? std::vector<int64_t>{64, 128, 192, 256, 320, 384, 448}
                            : std::vector<int64_t>{64 * static_cast<int64_t>(i), 320, 448});
    spec.cuts = wanted.back();
    spec.at_cut = [&, i](const SequenceState& state) {
      called[i].push_back(state.position());
      EXPECT_EQ(Everything(state), alone.at(state.position())) << i << " " << state.position();
    };
    ids.push_back(t.Add(std::move(spec)));
    t.Step();  // they join one after the other
  }
  t.RunAll();
  EXPECT_EQ(called, wanted);
  const Result cold = Cold(GetParam(), words, 1);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(t.results[ids[i]], cold) << i;
  EXPECT_EQ(t.results[stream], Cold(GetParam(), RandomPrompt(33, 30, kVocab), 40));
  t.engine->Remove(ids[3]);
  t.ExpectBaseline();
}

// A step that fails gives the slab of its copy back, too.
TEST_P(PrefixCacheTest, AFailedStepKeepsNoCopy) {
  EngineUnderTest t(GetParam(), Options());
  SequenceSpec spec = Watched(RandomPrompt(34, 80, kVocab), 1);
  spec.cuts = {64};
  spec.at_cut = [](const SequenceState&) { ADD_FAILURE(); };
  const SequenceId id = t.Add(std::move(spec));
  t.experts.fail_after = 1;
  t.Step();
  EXPECT_FALSE(t.results[id].error.ok());
  t.ExpectBaseline();
}

// Two readers of one snapshot at once: neither changes it or the latents of the other.
TEST_P(PrefixCacheTest, ASnapshotIsNotChangedByItsReaders) {
  const std::vector<TokenId> shared = RandomPrompt(3, 130, kVocab);
  Run(shared);
  std::vector<TokenId> one(shared.begin(), shared.begin() + 128), other = one;
  one.push_back(5);
  other.push_back(6);
  const SequenceId a = Start(one, 90), b = Start(other, 90);
  t_.RunAll();
  EXPECT_EQ(t_.results[a], Cold(GetParam(), one, 90));
  EXPECT_EQ(t_.results[b], Cold(GetParam(), other, 90));
  EXPECT_EQ(Run(one, 90), t_.results[a]);
  EXPECT_EQ(restored_, 128);
}

// The state while generating is the state of a prompt that holds the answer.
TEST_P(PrefixCacheTest, TheEndOfAnAnswerContinuesAsItsPrompt) {
  std::vector<TokenId> prompt = RandomPrompt(11, 90, kVocab);
  SequenceSpec spec = Watched(prompt, 150);
  spec.cut_answer = true;
  std::vector<StagedSnapshot> staged;
  spec.at_cut = [&](const SequenceState& state) {
    staged.push_back(*cache_->Stage(state));
    EXPECT_EQ(state.position(), static_cast<int64_t>(64 * (1 + staged.size())));
  };
  const SequenceId id = t_.Add(std::move(spec));
  t_.RunAll();
  const std::vector<TokenId>& answer = t_.results[id].tokens;
  ASSERT_EQ(answer.size(), 150u);
  ASSERT_EQ(staged.size(), 2u);  // at 128 and 192 of 239 computed positions

  prompt.insert(prompt.end(), answer.begin(), answer.end());
  const std::vector<TokenId> turn = RandomPrompt(12, 30, kVocab);
  prompt.insert(prompt.end(), turn.begin(), turn.end());
  ASSERT_TRUE(cache_->Publish(PathOf(prompt), std::move(staged.back()),
                              {.blocks = 3, .kind = SnapshotKind::kAnswerEnd}, absl::UnixEpoch()));
  staged.clear();
  EXPECT_EQ(Run(prompt), Cold(GetParam(), prompt));
  EXPECT_EQ(restored_, 192);
}

TEST_P(PrefixCacheTest, AJunctionServesTheThirdVisitor) {
  const std::vector<TokenId> document = RandomPrompt(20, 520, kVocab);
  const auto question = [&](uint64_t seed) {
    std::vector<TokenId> prompt = document;
    const auto more = RandomPrompt(seed, 100, kVocab);
    prompt.insert(prompt.end(), more.begin(), more.end());
    return prompt;
  };
  Run(question(1));
  EXPECT_EQ(restored_, 0);
  Run(question(2));
  EXPECT_EQ(restored_, 0);  // and left a snapshot where it parted
  EXPECT_EQ(Run(question(3)), Cold(GetParam(), question(3)));
  EXPECT_EQ(restored_, 512);
}

TEST_P(PrefixCacheTest, OtherSaltsOtherModelsAndOtherTokensFindNothing) {
  const std::vector<TokenId> prompt = RandomPrompt(5, 200, kVocab);
  Run(prompt);
  EXPECT_EQ(cache_->Find(PathOf(prompt)).snapshot.value(), 3);
  for (const auto& [model, salt] : {std::pair("model", "other"), {"models", "alt"}, {"", ""}}) {
    PrefixChain chain(model, salt);
    chain.Append(prompt);
    EXPECT_EQ(cache_->Find(chain.keys()), PrefixMatch{}) << model << salt;
  }
  std::vector<TokenId> changed = prompt;
  changed[0] ^= 1;
  EXPECT_EQ(cache_->Find(PathOf(changed)), PrefixMatch{});
}

// A budget of a few snapshots under random traffic: never a wrong answer, never a leak.
TEST_P(PrefixCacheTest, EvictionNeverChangesAnAnswer) {
  const StateLayout& layout = t_.engine->pools().layout;
  cache_ = MakeCache(3 * (layout.snapshot_bytes() + 4 * layout.block_bytes()));
  SeededEntropy random(99);
  std::vector<std::vector<TokenId>> known = {RandomPrompt(0, 70, kVocab)};
  int64_t hits = 0;
  for (int turn = 0; turn < 40; ++turn) {
    std::vector<TokenId> prompt = known[random.Next() % known.size()];
    const auto more =
        RandomPrompt(random.Next(), 1 + static_cast<int64_t>(random.Next() % 90), kVocab);
    prompt.insert(prompt.end(), more.begin(), more.end());
    if (prompt.size() > 260) prompt.resize(260);
    ASSERT_EQ(Run(prompt, 2), Cold(GetParam(), prompt, 2)) << turn;
    hits += restored_ > 0;
    known.push_back(prompt);
    ASSERT_EQ(cache_->tree().Check(), "");
  }
  EXPECT_GT(hits, 5);
  EXPECT_GT(cache_->tree().stats().evicted, 5u);
  EXPECT_EQ(cache_->stats().hits, static_cast<uint64_t>(hits));
  cache_->Clear();
  t_.ExpectBaseline();
}

}  // namespace
}  // namespace deltamesh

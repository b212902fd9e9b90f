// The exactness law on both golden checkpoints, clause by clause.
#include "tests/golden/exactness.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace deltamesh {
namespace {

constexpr int64_t kLong = 200;  // crosses three block boundaries and twelve tile boundaries

class Exactness : public testing::TestWithParam<std::string> {
 protected:
  Exactness() : runner_(GoldenFolder(GetParam()), 2) {}

  Truth LongTruth() {
    std::mt19937 random(kLong);
    return TruthOf(runner_, RandomTokens(random, kLong, runner_.vocab()));
  }

  ModelRunner runner_;
};

TEST_P(Exactness, TokenByToken) { ExpectStepwiseIsTheSame(runner_, LongTruth()); }

TEST_P(Exactness, AnySplit) { ExpectSplitsAreTheSame(runner_, LongTruth(), 24, 1); }

TEST_P(Exactness, CutsAroundTileAndBlockBoundaries) {
  const Truth truth = LongTruth();
  ExpectCutsAroundAreTheSame(runner_, truth, kTileTokens);
  ExpectCutsAroundAreTheSame(runner_, truth, kBlockTokens);
}

TEST_P(Exactness, InABatchWithOthers) {
  const Truth truth = LongTruth();
  for (uint32_t seed = 1; seed <= 4; ++seed) ExpectCompanyChangesNothing(runner_, truth, seed);
}

TEST_P(Exactness, OneTwoOrThreeThreads) {
  const Truth truth = LongTruth();
  for (const int threads : {1, 2, 3}) {
    ModelRunner other(runner_, threads);
    ExpectSplitsAreTheSame(other, truth, 4, static_cast<uint32_t>(threads));
    ExpectCompanyChangesNothing(other, truth, static_cast<uint32_t>(threads));
  }
}

// Long enough for three spans of latents: long calls split attention by queries, short ones by spans.
TEST_P(Exactness, SeveralSpansOfLatents) {
  constexpr int64_t kSpans = 1100;
  std::mt19937 random(kSpans);
  const Truth truth = TruthOf(runner_, RandomTokens(random, kSpans, runner_.vocab()));
  ExpectSplitsAreTheSame(runner_, truth, 4, 5);
  ExpectCutsAroundAreTheSame(runner_, truth, 512);
  ExpectCompanyChangesNothing(runner_, truth, 6);
}

TEST_P(Exactness, OnlyTheLogitsAskedFor) { ExpectFewerLogitsAreTheSame(runner_, LongTruth()); }

TEST_P(Exactness, LengthsAroundBoundaries) {
  ExpectExactness(runner_, {1, 2, 15, 16, 17, 31, 63, 64, 65, 129}, 7);
}

// Every length up to 200, each in a split of its own.
TEST_P(Exactness, EveryLength) {
  const Truth truth = LongTruth();
  std::mt19937 random(9);
  for (int64_t length = 1; length <= kLong; ++length) {
    const auto state = runner_.NewState(length);
    const Sizes sizes = RandomSizes(random, length, 1 + static_cast<int64_t>(random() % 80));
    const std::vector<float> logits =
        runner_.Feed(*state, std::span(truth.tokens).first(static_cast<size_t>(length)), sizes);
    EXPECT_TRUE(SameBits(logits, std::span(truth.logits).first(logits.size()))) << length;
  }
}

// A prefix is a prefix: the state of a longer sequence's beginning is the shorter sequence's state.
TEST_P(Exactness, TheFutureChangesNothing) {
  const Truth truth = LongTruth();
  for (const int64_t length : {1, 16, 50, 64, 100, 199}) {
    const auto state = runner_.NewState(kLong);
    const std::vector<float> logits =
        runner_.FeedAll(*state, std::span(truth.tokens).first(static_cast<size_t>(length)));
    EXPECT_TRUE(SameBits(logits, std::span(truth.logits).first(logits.size())));
  }
}

// Every layer reports each chunk once, in order, when its part of the state no longer changes.
TEST_P(Exactness, LayersReportFinalState) {
  std::mt19937 random(3);
  const Tokens tokens = RandomTokens(random, 70, runner_.vocab());
  const auto a = runner_.NewState(40), b = runner_.NewState(30);
  std::vector<int64_t> reported;
  std::vector<std::vector<float>> reported_s;
  std::vector<SequenceChunk> batch(2);
  batch[0].state = a.get();
  batch[0].tokens = std::span(tokens).first(40);
  batch[1].state = b.get();
  batch[1].tokens = std::span(tokens).last(30);
  const StateLayout& layout = runner_.model().state_layout();
  batch[0].layer_done = [&](int64_t layer) {
    reported.push_back(layer);
    const LayerKind& kind = runner_.config().layers[static_cast<size_t>(layer)];
    if (kind.mixer == MixerKind::kKda) {
      const float* s = a->slab_layer(kind.mixer_index).s;
      reported_s.emplace_back(s, s + layout.slab_layer_floats());
    } else {
      const float* rows = a->block_layer(0, kind.mixer_index);
      reported_s.emplace_back(rows, rows + 40 * layout.latent_width());
    }
  };
  runner_.Forward(batch);
  ASSERT_EQ(static_cast<int64_t>(reported.size()), runner_.config().layer_count());
  EXPECT_TRUE(std::is_sorted(reported.begin(), reported.end()));
  for (size_t i = 0; i < reported.size(); ++i) {
    const LayerKind& kind = runner_.config().layers[i];
    const float* now = kind.mixer == MixerKind::kKda ? a->slab_layer(kind.mixer_index).s
                                                     : a->block_layer(0, kind.mixer_index);
    EXPECT_TRUE(SameBits(reported_s[i], {now, reported_s[i].size()})) << "layer " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Exactness, testing::ValuesIn(GoldenNames()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace deltamesh

// 8-bit weights: the exactness law holds as it does for stored ones, the logits stay near the oracle's,
// and the width shows in the digest.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/golden/exactness.h"
#include "tests/golden/golden_file.h"

namespace deltamesh {
namespace {

LoadOptions EightBit() {
  LoadOptions options;
  options.weights = WeightWidth::k8bit;
  return options;
}

class Width : public testing::TestWithParam<std::string> {
 protected:
  Width() : stored_(GoldenFolder(GetParam()), 2), eight_(GoldenFolder(GetParam()), 2, EightBit()) {}

  ModelRunner stored_, eight_;
};

TEST_P(Width, TheLawHolds) { ExpectExactness(eight_, {1, 17, 65, 130}, 3); }

TEST_P(Width, IsNarrowerAndNamed) {
  EXPECT_LT(eight_.model().weight_bytes(), stored_.model().weight_bytes());
  EXPECT_NE(eight_.model().digest(), stored_.model().digest());
  EXPECT_EQ(eight_.model().digest().size(), 64u);
}

TEST_P(Width, APackedFileGivesTheSameBits) {
  const ScratchFolder scratch("width-" + GetParam());
  LoadOptions options = EightBit();
  options.packed.folder = scratch.path();
  std::mt19937 random(5);
  const Tokens tokens = RandomTokens(random, 40, eight_.vocab());
  const auto want = eight_.NewState(40);
  const std::vector<float> logits = eight_.FeedAll(*want, tokens);
  for (const bool built : {true, false}) {
    ModelRunner packed(GoldenFolder(GetParam()), 2, options);
    EXPECT_EQ(packed.model().packed().built, built);
    const auto state = packed.NewState(40);
    EXPECT_TRUE(SameBits(packed.FeedAll(*state, tokens), logits));
  }
}

// A weight is off by at most half a step, 1/254 of its block's largest: relative to the weights' RMS
// about 0.4 % in random ones. Through the layers of a tiny random model, whose near ties in the router
// may flip an expert, the median logit error stays below 5 % of the logits' RMS.
TEST_P(Width, LogitsStayNearTheOracle) {
  const GoldenFile golden = GoldenFile::Load(GoldenFolder(GetParam()));
  std::vector<double> errors;
  for (const GoldenPrompt& prompt : golden.prompts) {
    const auto state = eight_.NewState(std::ssize(prompt.tokens));
    const std::vector<float> logits = eight_.FeedAll(*state, prompt.tokens);
    for (const GoldenPosition& at : prompt.positions) {
      double difference = 0, size = 0;
      for (int64_t i = 0; i < eight_.vocab(); ++i) {
        const double want = at.logits[static_cast<size_t>(i)];
        const double got = logits[static_cast<size_t>(at.position * eight_.vocab() + i)];
        difference += (got - want) * (got - want);
        size += want * want;
      }
      errors.push_back(std::sqrt(difference / size));
    }
  }
  ASSERT_FALSE(errors.empty());
  std::sort(errors.begin(), errors.end());
  RecordProperty("median", std::to_string(errors[errors.size() / 2]));
  EXPECT_GT(errors.front(), 0);
  EXPECT_LT(errors[errors.size() / 2], 0.05);
}

INSTANTIATE_TEST_SUITE_P(Golden, Width, testing::ValuesIn(GoldenNames()));

}  // namespace
}  // namespace deltamesh

// 8-bit weights and activations: the exactness law holds as it does for stored weights and floats, the
// logits stay near the oracle's, and the mode shows in the digest.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/golden/exactness.h"
#include "tests/golden/golden_file.h"

namespace deltamesh {
namespace {

struct Mode {
  std::string model;
  WeightWidth weights;
  Activations activations;
};

LoadOptions Options(const Mode& mode) {
  LoadOptions options;
  options.weights = mode.weights;
  options.activations = mode.activations;
  return options;
}

class Width : public testing::TestWithParam<Mode> {
 protected:
  std::string Folder() const { return GoldenFolder(GetParam().model); }

  ModelRunner narrow_{GoldenFolder(GetParam().model), 2, Options(GetParam())};
};

TEST_P(Width, TheLawHolds) { ExpectExactness(narrow_, {1, 17, 65, 130}, 3); }

TEST_P(Width, IsNarrowerAndNamed) {
  ModelRunner plain(Folder(), 1);
  EXPECT_NE(narrow_.model().digest(), plain.model().digest());
  EXPECT_EQ(narrow_.model().digest().size(), 64u);
  if (GetParam().weights == WeightWidth::k8bit) {
    EXPECT_LT(narrow_.model().weight_bytes(), plain.model().weight_bytes());
  }
  if (GetParam().activations == Activations::kFloat) return;
  Mode other = GetParam();
  other.activations = Activations::kFloat;
  ModelRunner floats(Folder(), 1, Options(other));
  EXPECT_NE(narrow_.model().digest(), floats.model().digest());
  EXPECT_EQ(narrow_.model().weight_bytes(), floats.model().weight_bytes());
  // The mode must show, or the tests of this file compare nothing.
  std::mt19937 random(6);
  const Tokens tokens = RandomTokens(random, 20, narrow_.vocab());
  const auto a = narrow_.NewState(20), b = floats.NewState(20);
  EXPECT_FALSE(SameBits(narrow_.FeedAll(*a, tokens), floats.FeedAll(*b, tokens)));
}

TEST_P(Width, APackedFileGivesTheSameBits) {
  const ScratchFolder scratch("width-" + GetParam().model);
  LoadOptions options = Options(GetParam());
  options.packed.folder = scratch.path();
  std::mt19937 random(5);
  const Tokens tokens = RandomTokens(random, 40, narrow_.vocab());
  const auto want = narrow_.NewState(40);
  const std::vector<float> logits = narrow_.FeedAll(*want, tokens);
  for (const bool built : {true, false}) {
    ModelRunner packed(Folder(), 2, options);
    EXPECT_EQ(packed.model().packed().built, built);
    const auto state = packed.NewState(40);
    EXPECT_TRUE(SameBits(packed.FeedAll(*state, tokens), logits));
  }
}

// A weight is off by at most half a step, 1/254 of its block's largest: relative to the weights' RMS
// about 0.4 % in random ones. Through the layers of a tiny random model, whose near ties in the router
// may flip an expert, the median logit error stays below 5 % of the logits' RMS. Quantised inputs are off by
// as much again at every matrix.
TEST_P(Width, LogitsStayNearTheOracle) {
  const GoldenFile golden = GoldenFile::Load(Folder());
  std::vector<double> errors;
  for (const GoldenPrompt& prompt : golden.prompts) {
    const auto state = narrow_.NewState(std::ssize(prompt.tokens));
    const std::vector<float> logits = narrow_.FeedAll(*state, prompt.tokens);
    for (const GoldenPosition& at : prompt.positions) {
      double difference = 0, size = 0;
      for (int64_t i = 0; i < narrow_.vocab(); ++i) {
        const double want = at.logits[static_cast<size_t>(i)];
        const double got = logits[static_cast<size_t>(at.position * narrow_.vocab() + i)];
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

constexpr auto kFloat = Activations::kFloat, kInt8 = Activations::kInt8;
INSTANTIATE_TEST_SUITE_P(Golden, Width,
                         testing::Values(Mode{"kimi_k3_tiny", WeightWidth::k8bit, kFloat},
                                         Mode{"kimi_linear_tiny", WeightWidth::k8bit, kFloat},
                                         Mode{"kimi_k3_tiny", WeightWidth::kStored, kInt8},
                                         Mode{"kimi_k3_tiny", WeightWidth::k8bit, kInt8},
                                         Mode{"kimi_linear_tiny", WeightWidth::k8bit, kInt8}),
                         [](const auto& info) {
                           const Mode& m = info.param;
                           return m.model + "_" + std::string(WeightWidthName(m.weights)) + "_" +
                                  std::string(ActivationsName(m.activations));
                         });

// 8-bit activations alone change nothing in a model without matrices for them.
TEST(Activations, AreRefusedWhereTheyChangeNothing) {
  LoadOptions options;
  options.activations = kInt8;
  const auto model = Model::Load(GoldenFolder("kimi_linear_tiny"), options);
  EXPECT_EQ(model.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(std::string(model.status().message()).find("add --weights 8bit"), std::string::npos)
      << model.status();
}

}  // namespace
}  // namespace deltamesh

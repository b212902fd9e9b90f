// Every golden prompt of both families against the float64 oracle: logits, states, greedy continuations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "runtime/model/state_view.h"
#include "tests/golden/golden_file.h"
#include "tests/golden/model_runner.h"

namespace deltamesh {
namespace {

// The bound for float32 engines (model.md 19); the oracle's own float32 run stays below a tenth of it.
constexpr double kLogitError = 1e-3;
// State elements and logits in the mean: what float32 leaves of them, with a margin of about ten.
constexpr double kElementError = 1e-4;

class Golden : public testing::TestWithParam<std::string> {
 protected:
  Golden()
      : golden_(GoldenFile::Load(GoldenFolder(GetParam()))), runner_(GoldenFolder(GetParam()), 2) {}

  std::span<const float> Row(const std::vector<float>& logits, int64_t position) const {
    const auto vocab = static_cast<size_t>(runner_.vocab());
    return std::span(logits).subspan(static_cast<size_t>(position) * vocab, vocab);
  }

  static TokenId Argmax(std::span<const float> row) {
    return static_cast<TokenId>(std::max_element(row.begin(), row.end()) - row.begin());
  }

  std::vector<float> StateTensor(const SequenceState& state, const GoldenTensor& tensor) const {
    const int64_t i = runner_.config().layers.at(static_cast<size_t>(tensor.layer)).mixer_index;
    if (tensor.name == "S") return RecurrentState(state, i);
    if (tensor.name == "conv") return ConvTails(state, i);
    return tensor.name == "latent" ? Latents(state, i) : ExtraKeys(state, i);
  }

  GoldenFile golden_;
  ModelRunner runner_;
};

TEST_P(Golden, LogitsOfEveryPrompt) {
  std::printf("%-18s %7s %5s %12s\n", "checkpoint", "tokens", "wide", "worst error");
  for (const GoldenPrompt& p : golden_.prompts) {
    const auto state = runner_.NewState(static_cast<int64_t>(p.tokens.size()));
    const std::vector<float> logits = runner_.FeedAll(*state, p.tokens);
    double worst = 0;
    for (const GoldenPosition& at : p.positions) {
      const std::span<const float> row = Row(logits, at.position);
      worst = std::max(worst, WorstDifference(row, at.logits));
      for (const auto& [id, value] : at.top) {
        EXPECT_NEAR(row[static_cast<size_t>(id)], value, kLogitError) << "token " << id;
      }
    }
    EXPECT_LE(worst, kLogitError) << p.tokens.size() << " tokens";
    EXPECT_EQ(Disagreement(p.logits_checks, ChecksumsOf(logits), kElementError), "");
    if (p.wide_margin) {
      for (size_t t = 0; t < p.tokens.size(); ++t) {
        EXPECT_EQ(Argmax(Row(logits, static_cast<int64_t>(t))), p.argmax[t]) << "position " << t;
      }
    }
    std::printf("%-18s %7zu %5s %12.2e\n", GetParam().c_str(), p.tokens.size(),
                p.wide_margin ? "yes" : "no", worst);
  }
}

TEST_P(Golden, StatesAfterEveryPrompt) {
  double worst = 0;
  for (const GoldenPrompt& p : golden_.prompts) {
    const auto state = runner_.NewState(static_cast<int64_t>(p.tokens.size()));
    runner_.FeedAll(*state, p.tokens);
    for (const GoldenTensor& t : p.state) {
      SCOPED_TRACE(t.name + " of layer " + std::to_string(t.layer) + " after " +
                   std::to_string(p.tokens.size()) + " tokens");
      const std::vector<float> values = StateTensor(*state, t);
      EXPECT_EQ(Disagreement(t.checks, ChecksumsOf(values), kElementError), "");
      if (t.values.empty()) continue;
      const double error = WorstDifference(values, t.values);
      EXPECT_LE(error, kElementError);
      worst = std::max(worst, error);
    }
  }
  std::printf("%-18s worst state element error %.2e\n", GetParam().c_str(), worst);
}

TEST_P(Golden, GreedyContinuations) {
  for (const GoldenGreedy& g : golden_.greedy) {
    const auto state = runner_.NewState(static_cast<int64_t>(g.prompt.size() + g.tokens.size()));
    std::vector<float> logits = runner_.FeedAll(*state, g.prompt);
    std::span<const float> last = Row(logits, static_cast<int64_t>(g.prompt.size()) - 1);
    Tokens generated;
    for (size_t i = 0; i < g.tokens.size(); ++i) {
      generated.push_back(Argmax(last));
      logits = runner_.FeedAll(*state, {&generated.back(), 1});
      last = Row(logits, 0);
    }
    EXPECT_EQ(generated, g.tokens);
    EXPECT_LE(WorstDifference(last, g.last_logits), kLogitError);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Golden, testing::ValuesIn(GoldenNames()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace deltamesh

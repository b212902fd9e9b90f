// A model mapped from a packed file gives the bits of one packed in memory.
#include <gtest/gtest.h>

#include "tests/golden/model_runner.h"

namespace deltamesh {
namespace {

class PackedLogits : public testing::TestWithParam<std::string> {};

TEST_P(PackedLogits, AreThoseOfWeightsInMemory) {
  const ScratchFolder scratch("packed-logits-" + GetParam());
  ModelRunner memory(GoldenFolder(GetParam()), 2);
  EXPECT_TRUE(memory.model().packed().path.empty());
  std::mt19937 random(7);
  const Tokens tokens = RandomTokens(random, 70, memory.vocab());
  const auto want_state = memory.NewState(70);
  const std::vector<float> want = memory.FeedAll(*want_state, tokens);
  LoadOptions options;
  options.packed.folder = scratch.path();
  for (const bool built : {true, false}) {
    ModelRunner packed(GoldenFolder(GetParam()), 2, options);
    ASSERT_FALSE(packed.model().packed().path.empty());
    EXPECT_EQ(packed.model().packed().built, built);
    EXPECT_EQ(packed.model().digest(), memory.model().digest());
    const auto state = packed.NewState(70);
    EXPECT_TRUE(SameBits(packed.FeedAll(*state, tokens), want));
    EXPECT_TRUE(SameBits(StateFloats(*state), StateFloats(*want_state)));
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, PackedLogits, testing::ValuesIn(GoldenNames()));

}  // namespace
}  // namespace deltamesh

#include "services/cli/generate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "absl/strings/str_join.h"
#include "services/cli/load_progress.h"
#include "tests/unit/engine/engine_fixture.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

class GenerateTest : public ::testing::TestWithParam<const char*> {
 protected:
  GenerateOptions Options() {
    GenerateOptions o;
    o.model = testing::GoldenFolder(GetParam());
    o.threads = 1;
    o.max_tokens = 8;
    o.ignore_eos = true;
    return o;
  }
  std::string Run(const GenerateOptions& o) {
    std::ostringstream out;
    notes.str("");
    const absl::Status s = RunGenerate(o, out, notes);
    EXPECT_TRUE(s.ok()) << s;
    return out.str();
  }
  std::string Error(const GenerateOptions& o) {
    std::ostringstream out;
    const absl::Status s = RunGenerate(o, out, notes);
    EXPECT_EQ(out.str(), "");
    return std::string(s.message());
  }
  std::ostringstream notes;
};

INSTANTIATE_TEST_SUITE_P(Families, GenerateTest,
                         ::testing::Values("kimi_k3_tiny", "kimi_linear_tiny"),
                         [](const auto& param) { return std::string(param.param); });

TEST_P(GenerateTest, GreedyTokensOfTheOracle) {
  GenerateOptions o = Options();
  o.sampling.temperature = 0;
  o.show_tokens = true;
  const nlohmann::json golden = testing::GoldenJson(GetParam());
  for (const auto& g : golden["greedy"]) {
    o.tokens = g["prompt"].get<std::vector<TokenId>>();
    EXPECT_EQ(Run(o), absl::StrJoin(g["tokens"].get<std::vector<TokenId>>(), ",") + "\n");
    EXPECT_THAT(notes.str(), HasSubstr("answer 8 tokens"));
    EXPECT_THAT(notes.str(), HasSubstr("ended by --max-tokens"));
  }
}

TEST_P(GenerateTest, TextAndChatFollowTheSeed) {
  GenerateOptions text = Options(), chat = Options();
  text.prompt = "Hello world";
  chat.chat = "Hello world";
  for (GenerateOptions* o : {&text, &chat}) {
    o->max_tokens = 24;
    o->seed = 5;
    const std::string first = Run(*o);
    EXPECT_EQ(Run(*o), first);
    o->seed = 6;
    EXPECT_NE(Run(*o), first);
    o->seed.reset();
    Run(*o);
    EXPECT_THAT(notes.str(), HasSubstr("seed "));
  }
}

TEST_P(GenerateTest, EndsBeforeAStopString) {
  GenerateOptions o = Options();
  o.prompt = "Hello world";
  o.seed = 5;
  o.max_tokens = 24;
  const std::string whole = Run(o);
  size_t at = whole.find_first_of("abcdefghijklmnopqrstuvwxyz", 1);
  ASSERT_NE(at, whole.npos);
  o.stops = {whole.substr(at, 1)};
  at = whole.find(o.stops[0]);
  EXPECT_EQ(Run(o), whole.substr(0, at) + "\n");
  EXPECT_THAT(notes.str(), HasSubstr("ended by stop string"));
}

TEST_P(GenerateTest, BiasScoresAndStopTokens) {
  GenerateOptions o = Options();
  o.sampling.temperature = 0;
  o.show_tokens = true;
  o.tokens = {1, 2, 3};
  o.max_tokens = 4;
  o.logit_bias = {"17=100", "18=-100"};
  o.sampling.logprobs = 2;
  EXPECT_EQ(Run(o), "17,17,17,17\n");
  EXPECT_THAT(notes.str(), HasSubstr("token 17 logprob "));
  EXPECT_THAT(notes.str(), HasSubstr(", best "));
  o.stop_tokens = {9, 17};
  o.sampling.logprobs = -1;
  EXPECT_EQ(Run(o), "\n");  // the stop token is no part of the answer
  EXPECT_THAT(notes.str(), HasSubstr("answer 1 tokens"));
  EXPECT_THAT(notes.str(), HasSubstr("ended by end or stop token"));

  o.stop_tokens = {1000000};
  EXPECT_THAT(Error(o), HasSubstr("--stop-token: 1000000"));
  o.stop_tokens.clear();
  for (const char* bad : {"17", "=1", "17=", "17=x", "x=1", "17:1", "17=1=2", ""}) {
    o.logit_bias = {bad};
    EXPECT_THAT(Error(o), HasSubstr("--logit-bias")) << bad;
  }
  o.logit_bias = {"17=1", "3=1", "17=2"};
  EXPECT_THAT(Error(o), HasSubstr("token 17 has two values"));
}

class SetClock final : public Clock {
 public:
  absl::Time Now() const override { return now; }
  absl::Time now = absl::FromUnixSeconds(1000);
};

TEST(LoadProgress, SpeaksOnlyWhenLoadingTakesLong) {
  for (const bool terminal : {false, true}) {
    SetClock clock;
    std::ostringstream notes;
    const auto quick = LoadProgress(&clock, &notes, terminal);
    for (int64_t done = 0; done <= 19; ++done, clock.now += absl::Milliseconds(100))
      quick(done, 19);
    EXPECT_EQ(notes.str(), "");

    const auto slow = LoadProgress(&clock, &notes, terminal);
    for (int64_t done = 0; done <= 40; ++done, clock.now += absl::Milliseconds(100)) {
      slow(done << 20, 40 << 20);
    }
    const std::string first = "loading weights: 20 of 40 MiB, 50 %";
    EXPECT_EQ(notes.str().find(first), terminal ? 1u : 0u) << notes.str();
    EXPECT_THAT(notes.str(), HasSubstr("30 of 40 MiB"));
    EXPECT_EQ(notes.str().find("21 of 40"), std::string::npos);
    EXPECT_THAT(notes.str(), HasSubstr("40 of 40 MiB, 100 %\n"));
  }
}

TEST_P(GenerateTest, RefusesBadFlagsBeforeTheWeightsAreRead) {
  GenerateOptions o = Options();
  EXPECT_THAT(Error(o), HasSubstr("exactly one"));
  o.prompt = "";
  EXPECT_THAT(Error(o), HasSubstr("--prompt"));
  o.prompt = "a";
  o.tokens = {1};
  EXPECT_THAT(Error(o), HasSubstr("2 given"));
  o.tokens = {};
  o.max_tokens = 0;
  EXPECT_THAT(Error(o), HasSubstr("--max-tokens"));
  o.max_tokens = 1;
  o.sampling.top_p = 2;
  EXPECT_THAT(Error(o), HasSubstr("top_p"));
  o.sampling.top_p = 1;
  o.stops = {""};
  EXPECT_THAT(Error(o), HasSubstr("stop[0]"));
  o.stops = {};
  o.model = "/nowhere";
  EXPECT_THAT(Error(o), HasSubstr("/nowhere"));
}

}  // namespace
}  // namespace deltamesh

// `deltamesh logits`: bad options are named before any work, and the files hold what they say.
#include "services/cli/logits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/golden/golden_file.h"
#include "tests/golden/model_runner.h"

namespace deltamesh {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

LogitsOptions Options(const ScratchFolder& scratch, const char* out) {
  LogitsOptions o;
  o.model = GoldenFolder("kimi_k3_tiny");
  o.tokens = {706, 442, 30, 200, 761, 634, 232};
  o.out = scratch.path() + "/" + out;
  return o;
}

void ExpectRefused(const LogitsOptions& options, const char* what) {
  const absl::Status status = RunLogits(options);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(what));
}

TEST(LogitsCommand, FeedNames) {
  EXPECT_THAT(*ParseFeed("all", 7), ElementsAre(7));
  EXPECT_THAT(*ParseFeed("step", 3), ElementsAre(1, 1, 1));
  EXPECT_THAT(*ParseFeed("chunks:5,1,7", 13), ElementsAre(5, 1, 7));
  for (const char* bad :
       {"", "ALL", "chunks:", "chunks:5", "chunks:5,1,8", "chunks:5,,8", "chunks:13,",
        "chunks:0,13", "chunks:-1,14", "chunks:6 7", "chunks:99999999999999999999"}) {
    EXPECT_EQ(ParseFeed(bad, 13).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(LogitsCommand, BadOptionsAreNamed) {
  const ScratchFolder scratch("logits-bad");
  LogitsOptions o = Options(scratch, "x.npy");
  o.tokens.clear();
  ExpectRefused(o, "tokens: none");
  o = Options(scratch, "x.npy");
  o.tokens[3] = 768;
  ExpectRefused(o, "tokens: entry 3 is 768");
  o = Options(scratch, "x.npy");
  o.tokens[0] = -1;
  ExpectRefused(o, "tokens: entry 0 is -1");
  o = Options(scratch, "x.npy");
  o.threads = 0;
  ExpectRefused(o, "threads: 0");
  o = Options(scratch, "x.npy");
  o.feed = "chunks:3,3";
  ExpectRefused(o, "adds up to 6");
  o = Options(scratch, "x.npy");
  o.out.clear();
  ExpectRefused(o, "out: no file");
  o = Options(scratch, "no/such/folder/x.npy");
  ExpectRefused(o, "no/such/folder/x.npy: cannot create");
  EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
}

TEST(LogitsCommand, EveryFeedWritesTheSameBytes) {
  const ScratchFolder scratch("logits-feeds");
  std::vector<std::string> logits, recurrent, latents;
  for (const char* feed : {"all", "step", "chunks:2,4,1"}) {
    LogitsOptions o = Options(scratch, "x.npy");
    o.feed = feed;
    o.states = true;
    o.threads = static_cast<int>(logits.size()) + 1;
    const absl::Status status = RunLogits(o);
    ASSERT_TRUE(status.ok()) << status;
    logits.push_back(ReadFile(o.out));
    recurrent.push_back(ReadFile(o.out + ".states/S.0.npy"));
    latents.push_back(ReadFile(o.out + ".states/latent.3.npy"));
    std::filesystem::remove_all(o.out + ".states");
  }
  for (const auto* files : {&logits, &recurrent, &latents}) {
    EXPECT_FALSE(files->front().empty());
    EXPECT_EQ(files->at(1), files->at(0));
    EXPECT_EQ(files->at(2), files->at(0));
  }
}

// The second golden prompt: shape in the header, data at a multiple of 64, values as the oracle has them.
TEST(LogitsCommand, TheFileIsAnArrayOfTheOraclesLogits) {
  const ScratchFolder scratch("logits-file");
  const GoldenFile golden = GoldenFile::Load(GoldenFolder("kimi_k3_tiny"));
  const LogitsOptions o = Options(scratch, "x.npy");
  const GoldenPrompt& prompt = golden.prompts.at(1);
  ASSERT_EQ(o.tokens, prompt.tokens);
  const absl::Status status = RunLogits(o);
  ASSERT_TRUE(status.ok()) << status;
  const std::string file = ReadFile(o.out);
  constexpr size_t kHeader = 128, kVocab = 768;
  ASSERT_EQ(file.size(), kHeader + 7 * kVocab * sizeof(float));
  EXPECT_THAT(file.substr(0, kHeader), HasSubstr("'descr': '<f4'"));
  EXPECT_THAT(file.substr(0, kHeader), HasSubstr("'shape': (7,768,)"));
  std::vector<float> values(7 * kVocab);
  std::memcpy(values.data(), file.data() + kHeader, values.size() * sizeof(float));
  for (const GoldenPosition& at : prompt.positions) {
    const auto begin = static_cast<size_t>(at.position) * kVocab;
    EXPECT_LE(WorstDifference(std::span(values).subspan(begin, kVocab), at.logits), 1e-3);
  }
}

}  // namespace
}  // namespace deltamesh

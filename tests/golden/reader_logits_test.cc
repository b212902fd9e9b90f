// The shipped model's weights: the engine's logits and states for a prompt of its own are the float64
// oracle's.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

#include "nlohmann/json.hpp"
#include "services/cli/logits.h"
#include "tests/golden/model_runner.h"

namespace deltamesh {
namespace {

constexpr char kReader[] = DELTAMESH_SOURCE_DIR "/models/reader";
constexpr char kQuestions[] = DELTAMESH_SOURCE_DIR "/tests/data/reader/questions.json";
constexpr char kCheck[] = DELTAMESH_SOURCE_DIR "/tests/golden/oracle_check.py";
// Over the error that the oracle makes when it computes in float32: the engine adds in another order, whose
// error is as large but not the same.
constexpr char kMargin[] = "10";

// The shortest dialogue of the questions, cut to an odd length.
Tokens Prompt() {
  std::ifstream in(kQuestions);
  Tokens shortest;
  for (const auto& question : nlohmann::json::parse(in)) {
    auto ids = question["ids"].get<Tokens>();
    if (shortest.empty() || ids.size() < shortest.size()) shortest = std::move(ids);
  }
  if (shortest.size() % 2 == 0) shortest.pop_back();
  return shortest;
}

TEST(ReaderLogits, AreTheOracles) {
  const ScratchFolder scratch("reader-logits");
  LogitsOptions options;
  options.model = kReader;
  options.tokens = Prompt();
  ASSERT_GT(options.tokens.size(), 128u);
  options.feed = "chunks:67,60," + std::to_string(options.tokens.size() - 127);
  options.out = scratch.path() + "/logits.npy";
  options.states = true;
  options.threads = 2;
  const absl::Status status = RunLogits(options);
  ASSERT_TRUE(status.ok()) << status;
  int exit = 0;
  const std::string output =
      RunCommand(std::string(kPython) + " " + kCheck + " compare " + kReader + " " + options.out +
                     " --tokens " + Join(options.tokens) + " --float32-margin " + kMargin,
                 &exit);
  std::printf("%s", output.c_str());
  EXPECT_EQ(exit, 0) << output;
}

}  // namespace
}  // namespace deltamesh

// The shipped model's weights: the engine's logits and states for a prompt of its own are the float64
// oracle's.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

#include "nlohmann/json.hpp"
#include "tests/golden/oracle_comparison.h"

namespace deltamesh {
namespace {

constexpr char kReader[] = DELTAMESH_SOURCE_DIR "/models/reader";
constexpr char kQuestions[] = DELTAMESH_SOURCE_DIR "/tests/data/reader/questions.json";
// Over the error that the oracle makes when it computes in float32: the engine adds in another order, whose
// error is as large but not the same.
constexpr char kMargin[] = "--float32-margin 10";

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
  const Tokens prompt = Prompt();
  ASSERT_GT(prompt.size(), 128u);
  const std::string feed = "chunks:67,60," + std::to_string(prompt.size() - 127);
  std::printf("%s", ExpectTheOracles(kReader, prompt, feed, scratch.path(), kMargin).c_str());
}

}  // namespace
}  // namespace deltamesh

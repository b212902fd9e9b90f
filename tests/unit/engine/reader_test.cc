// The shipped model answers from what it read: with its state it gives the right answer, and a state that
// lost something, or somebody else's, shows in the answer. So an answer tells a lost state from a kept one.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/unit/engine/engine_fixture.h"

namespace deltamesh {
namespace {

using testing::EngineUnderTest;
using testing::GreedySpec;
using testing::Result;

// Of 40, the same on every machine, as are those below that are right when something is lost.
constexpr int kRight = 39;
// The folder of the shipped model, seen from those of the golden files.
constexpr char kReader[] = "../../../models/reader";

struct Question {
  std::vector<TokenId> prompt, answer;
  // Where a hand-off would move the state.
  int64_t at() const {
    return (static_cast<int64_t>(prompt.size()) - 1) / kBlockTokens * kBlockTokens;
  }
};

// Texts and questions of words that were not trained on; the first two, the next two, ... have the same at().
std::vector<Question> Questions() {
  std::ifstream in(std::string(DELTAMESH_SOURCE_DIR) + "/tests/data/reader/questions.json");
  std::vector<Question> questions;
  for (const auto& entry : nlohmann::json::parse(in)) {
    const auto ids = entry["ids"].get<std::vector<TokenId>>();
    const auto begin = ids.begin() + entry["begin"].get<int64_t>();
    questions.push_back({{ids.begin(), begin}, {begin, ids.end()}});
  }
  return questions;
}

enum class Lost { kNothing, kRecurrentState, kLatents, kEverythingForAnother };

class ReaderTest : public ::testing::Test {
 protected:
  static EngineOptions Options() {
    EngineOptions options;
    options.slabs = 100;
    options.running_max = 50;
    return options;
  }
  ReaderTest() : t_(kReader, Options()), questions_(Questions()) {
    for (const Question& q : questions_) {
      SequenceSpec spec = GreedySpec(q.prompt, 0);
      spec.stop_at = q.at();
      read_.push_back(t_.Add(std::move(spec)));
    }
    t_.RunAll();
  }

  // What a hand-off of question `i` would put in place where `lost` went wrong.
  std::unique_ptr<SequenceState> HandedOver(size_t i, Lost lost) {
    const SequenceId from = read_[lost == Lost::kEverythingForAnother ? i ^ 1 : i];
    const SequenceState& source = *t_.engine->state(from);
    auto state = *SequenceState::Create(t_.engine->pools());
    CHECK_OK(state->Reserve(source.position()));
    const StateLayout& layout = source.layout();
    for (size_t b = 0; b < source.blocks().size(); ++b) {
      const float* latents = source.blocks()[b].data();
      if (lost == Lost::kLatents) {
        std::fill_n(state->blocks()[b].data(), layout.block_floats(), 0.0f);
      } else {
        std::copy_n(latents, layout.block_floats(), state->blocks()[b].data());
      }
    }
    if (lost == Lost::kRecurrentState) {
      std::fill_n(state->slab().data(), layout.slab_floats(), 0.0f);
      state->ResetOpenTile();
    } else {
      std::copy_n(source.slab().data(), layout.slab_floats(), state->slab().data());
    }
    state->Advance(source.position());
    return state;
  }

  // Questions answered right, to the token, where each state was handed over like that.
  int Right(Lost lost) {
    std::vector<SequenceId> asked;
    for (size_t i = 0; i < questions_.size(); ++i) {
      const Question& q = questions_[i];
      SequenceSpec spec = GreedySpec(q.prompt, static_cast<int64_t>(q.answer.size()));
      spec.state = HandedOver(i, lost);
      asked.push_back(t_.Add(std::move(spec)));
    }
    t_.RunAll();
    int right = 0;
    for (size_t i = 0; i < questions_.size(); ++i) {
      right += t_.results[asked[i]].tokens == questions_[i].answer ? 1 : 0;
    }
    return right;
  }

  int asked() const { return static_cast<int>(questions_.size()); }

  EngineUnderTest t_;
  const std::vector<Question> questions_;
  std::vector<SequenceId> read_;
};

TEST_F(ReaderTest, AnswersAreRightWithTheState) {
  const int right = Right(Lost::kNothing);
  RecordProperty("right", right);
  EXPECT_EQ(right, kRight) << "of " << asked();
}

TEST_F(ReaderTest, WhatIsLostShowsInTheAnswers) {
  struct Loss {
    const char* name;
    Lost lost;
    int right;
  };
  for (const auto& [name, lost, still_right] :
       {Loss{"recurrent state", Lost::kRecurrentState, 0}, Loss{"latents", Lost::kLatents, 0},
        Loss{"another's state", Lost::kEverythingForAnother, 0}}) {
    const int right = Right(lost);
    RecordProperty(name, right);
    EXPECT_EQ(right, still_right) << name;
    EXPECT_LT(10 * right, 3 * asked()) << name;
  }
}

TEST_F(ReaderTest, AColdRunGivesTheSameAnswers) {
  constexpr size_t kSome = 12;
  std::vector<SequenceId> cold, warm;
  for (size_t i = 0; i < kSome; ++i) {
    const int64_t tokens = static_cast<int64_t>(questions_[i].answer.size());
    cold.push_back(t_.Add(GreedySpec(questions_[i].prompt, tokens)));
    SequenceSpec spec = GreedySpec(questions_[i].prompt, tokens);
    spec.state = HandedOver(i, Lost::kNothing);
    warm.push_back(t_.Add(std::move(spec)));
  }
  t_.RunAll();
  for (size_t i = 0; i < kSome; ++i) {
    EXPECT_EQ(t_.results[cold[i]].tokens, t_.results[warm[i]].tokens) << i;
  }
}

}  // namespace
}  // namespace deltamesh

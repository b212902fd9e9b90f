// Conversations that go on: what was said, ended, and new messages give the tokens of rendering everything at
// once, wherever the answer was cut.
#include "runtime/text/open_turn.h"

#include "tests/unit/text/chat_test_util.h"

namespace deltamesh {
namespace {

using Ids = std::vector<TokenId>;

class OpenTurnTest : public ::testing::TestWithParam<const char*> {
 protected:
  bool k3() const { return std::string(GetParam()) == "kimi_k3"; }

  Ids Encode(const absl::StatusOr<std::vector<Segment>>& segments) const {
    CHECK_OK(segments.status());
    return *tokenizer->EncodeSegments(*segments);
  }
  Ids Prompt(const ChatRequest& r) const { return Encode(format->Render(r)); }
  Ids Special(const std::string& text) const {
    return *tokenizer->EncodeSegments(std::vector<Segment>{{text, true}});
  }
  // `said` goes on with the messages of `more`.
  Ids GoOn(const Ids& said, const ChatRequest& more) const {
    const OpenTurn turn = format->FindOpenTurn(said);
    Ids out(said.begin(), said.begin() + static_cast<ptrdiff_t>(turn.keep));
    for (const Ids& part : {Encode(turn.closing), Encode(format->RenderMore(more))}) {
      out.insert(out.end(), part.begin(), part.end());
    }
    return out;
  }
  // The tokens that a model says for `answer` after the prompt of `asked`: what rendering both adds.
  Ids AnswerTokens(const ChatRequest& asked, const ChatMessage& answer) const {
    ChatRequest both = asked;
    both.messages.push_back(answer);
    both.add_generation_prompt = false;
    Ids all = Prompt(both);
    const Ids prompt = Prompt(asked);
    EXPECT_TRUE(std::equal(prompt.begin(), prompt.end(), all.begin()));
    all.erase(all.begin(), all.begin() + static_cast<ptrdiff_t>(prompt.size()));
    return all;
  }
  static Ids Join(Ids a, const Ids& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }

  std::unique_ptr<const Tokenizer> tokenizer = GoldenTokenizer(GetParam());
  std::unique_ptr<const ChatFormat> format = GoldenFormat(GetParam(), *tokenizer);
};

INSTANTIATE_TEST_SUITE_P(Families, OpenTurnTest, ::testing::Values("kimi_k3", "kimi_linear"));

ChatRequest Asked() {
  ChatRequest r;
  r.messages = {{.role = "system", .content = "Be brief."}, {.role = "user", .content = "Hé? 12"}};
  return r;
}
ChatRequest Next() {
  ChatRequest r;
  r.messages = {{.role = "user", .content = "And 中?"}};
  return r;
}

TEST_P(OpenTurnTest, TurnByTurnGivesTheTokensOfAllAtOnce) {
  ChatRequest all = Asked();
  Ids said = Prompt(all);
  for (int turn = 0; turn < 4; ++turn) {
    ChatMessage answer{.role = "assistant", .content = absl::StrFormat("No. %d!", turn)};
    if (k3()) answer.reasoning_content = "hm, so";
    said = Join(said, AnswerTokens(all, answer));
    all.messages.push_back(answer);
    ChatRequest more;
    more.messages = {{.role = "user", .content = absl::StrFormat("more %d", turn)}};
    if (turn == 2) more.messages.push_back({.role = "system", .content = "Be long."});
    said = GoOn(said, more);
    all.messages.insert(all.messages.end(), more.messages.begin(), more.messages.end());
    ASSERT_EQ(said, Prompt(all)) << turn;
  }
}

// Every prefix of an answer, as limits, stop strings and clients may cut it. What was shown of it, rendered
// as a message, gives the same tokens wherever its text is cut between its own tokens.
TEST_P(OpenTurnTest, CutAnywhereItIsTheMessageThatWasShown) {
  ChatRequest asked = Asked();
  ChatMessage answer{.role = "assistant", .content = "One 中 two."};
  if (k3()) answer.reasoning_content = "hm é so";
  const Ids tokens = AnswerTokens(asked, answer);
  const Ids prompt = Prompt(asked);
  int equal = 0;
  for (size_t n = 0; n <= tokens.size(); ++n) {
    const Ids cut(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(n));
    const OpenTurn turn = format->FindOpenTurn(Join(prompt, cut));
    ASSERT_LE(turn.keep, prompt.size() + n);
    ASSERT_GE(turn.keep, prompt.size()) << "the prompt is whole";
    // Parsed as far as it is kept: the rest was a header that nobody was shown.
    const auto parser = format->NewParser(asked);
    const AnswerDelta shown = ParseAll(*parser, std::span(cut).first(turn.keep - prompt.size()));
    ChatRequest all = asked;
    all.messages.push_back(
        {.role = "assistant", .content = shown.content, .reasoning_content = shown.reasoning});
    all.messages.push_back(Next().messages[0]);
    const Ids got = GoOn(Join(prompt, cut), Next());
    const Ids want = Prompt(all);
    EXPECT_EQ(tokenizer->Decode(got), tokenizer->Decode(want)) << n;
    equal += got == want;
  }
  EXPECT_GT(equal, static_cast<int>(tokens.size()) / 2);  // not where a character is cut
}

TEST_P(OpenTurnTest, UnfinishedCallsAreDroppedAndFinishedOnesStay) {
  ChatRequest asked = Asked();
  ChatMessage answer{.role = "assistant", .content = "I look."};
  answer.tool_calls = Json::parse(R"([
    {"id": "functions.f:0", "function": {"name": "f", "arguments": "{\"a\": 1}"}},
    {"id": "functions.g:1", "function": {"name": "g", "arguments": "{\"b\": \"x\"}"}}])");
  const Ids prompt = Prompt(asked);
  const Ids tokens = AnswerTokens(asked, answer);
  std::vector<Ids> wanted;
  for (size_t calls = 0; calls <= 2; ++calls) {
    ChatRequest all = asked;
    all.messages.push_back(answer);
    Json& kept = all.messages.back().tool_calls;
    while (kept.size() > calls) kept.erase(kept.size() - 1);
    if (calls == 0) kept = Json();
    all.messages.push_back(Next().messages[0]);
    wanted.push_back(Prompt(all));
  }
  size_t best = 0;
  bool spoken = false;
  for (size_t n = 0; n <= tokens.size(); ++n) {
    const Ids cut(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(n));
    const Ids got = GoOn(Join(prompt, cut), Next());
    const auto it = std::find(wanted.begin(), wanted.end(), got);
    spoken |= it != wanted.end();
    if (!spoken) continue;  // the content is not all there yet
    ASSERT_NE(it, wanted.end()) << n << " " << tokenizer->Decode(got);
    ASSERT_GE(static_cast<size_t>(it - wanted.begin()), best) << n;
    best = static_cast<size_t>(it - wanted.begin());
  }
  EXPECT_EQ(best, 2u);
}

TEST_P(OpenTurnTest, OtherEndsAndForeignTextAreLeftAlone) {
  EXPECT_EQ(format->FindOpenTurn({}).keep, 0u);
  const Ids text = *tokenizer->EncodeOrdinary("no conversation");
  const OpenTurn turn = format->FindOpenTurn(text);
  EXPECT_EQ(turn.keep, text.size());
  EXPECT_TRUE(turn.closing.empty());
  // Whole: nothing to add.
  ChatRequest asked = Asked();
  const Ids whole =
      Join(Prompt(asked), AnswerTokens(asked, {.role = "assistant", .content = "Yes"}));
  EXPECT_TRUE(format->FindOpenTurn(whole).closing.empty());
  EXPECT_EQ(format->FindOpenTurn(whole).keep, whole.size());
}

TEST_P(OpenTurnTest, NoiseIsClosedWithoutEnd) {
  std::mt19937_64 rng(7);
  const Ids prompt = Prompt(Asked());
  for (int i = 0; i < 2000; ++i) {
    Ids noise = prompt;
    const size_t n = rng() % 60;
    for (size_t k = 0; k < n; ++k) {
      noise.push_back(static_cast<TokenId>(rng() % 2 == 0 ? 512 + rng() % 20 : rng() % 512));
    }
    const OpenTurn turn = format->FindOpenTurn(noise);
    ASSERT_LE(turn.keep, noise.size());
    ASSERT_LE(turn.closing.size(), 24u);
    Ids closed(noise.begin(), noise.begin() + static_cast<ptrdiff_t>(turn.keep));
    closed = Join(closed, Encode(turn.closing));
    const OpenTurn again = format->FindOpenTurn(closed);
    ASSERT_EQ(again.keep, closed.size()) << tokenizer->Decode(closed);
    ASSERT_TRUE(again.closing.empty()) << tokenizer->Decode(closed);
  }
}

TEST_P(OpenTurnTest, WhatBelongsToTheBeginningIsRefused) {
  ChatRequest more = Next();
  more.tools = Json::parse(R"([{"type": "function", "function": {"name": "f"}}])");
  ExpectError(format->RenderMore(more).status(), absl::StatusCode::kInvalidArgument,
              {"tools:", "begin a new one"});
  more = Next();
  if (k3()) {
    more.effort = "low";
    more.effort_field = "thinking_effort";
    ExpectError(format->RenderMore(more).status(), absl::StatusCode::kInvalidArgument,
                {"thinking_effort:"});
  }
  ExpectError(format->RenderMore(ChatRequest()).status(), absl::StatusCode::kInvalidArgument,
              {"messages: empty"});
}

}  // namespace
}  // namespace deltamesh

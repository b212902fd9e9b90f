#include <gmock/gmock.h>

#include "tests/unit/text/chat_test_util.h"

namespace deltamesh {
namespace {

using Ids = std::vector<TokenId>;
using ::testing::ElementsAre;

constexpr char kSection[] = "<|tool_calls_section_begin|>";
constexpr char kSectionEnd[] = "<|tool_calls_section_end|>";
constexpr char kCall[] = "<|tool_call_begin|>";
constexpr char kArguments[] = "<|tool_call_argument_begin|>";
constexpr char kCallEnd[] = "<|tool_call_end|>";

class LinearAnswerTest : public ::testing::Test {
 protected:
  LinearAnswerTest()
      : tokenizer(GoldenTokenizer("kimi_linear")),
        format(GoldenFormat("kimi_linear", *tokenizer)) {}

  Ids Tokens(const std::string& text) {
    return *tokenizer->EncodeSegments(std::vector<Segment>{{text, true}});
  }
  AnswerDelta Parse(const std::string& text) {
    const auto parser = format->NewParser({});
    return ParseAll(*parser, Tokens(text));
  }

  // What may be shown of `text`: special tokens are nothing.
  std::string Shown(const std::string& text) { return Shown(Tokens(text)); }
  std::string Shown(Ids ids) {
    std::erase_if(ids, [&](TokenId id) { return tokenizer->is_special(id); });
    return tokenizer->Decode(ids);
  }

  std::unique_ptr<const Tokenizer> tokenizer;
  std::unique_ptr<const ChatFormat> format;
};

TEST_F(LinearAnswerTest, ContentOnly) {
  const AnswerDelta d = Parse("Hello 中é!<|im_end|>");
  EXPECT_EQ(d.content, "Hello 中é!");
  EXPECT_EQ(d.reasoning, "");
  EXPECT_TRUE(d.tool_calls.empty());
}

TEST_F(LinearAnswerTest, ToolCalls) {
  const AnswerDelta d = Parse(std::string("Look.") + kSection + kCall + "functions.get_weather:0" +
                              kArguments + "{\"city\": \"Rome\"}" + kCallEnd + kCall + " odd id " +
                              kArguments + kCallEnd + kSectionEnd + "<|im_end|>");
  EXPECT_EQ(d.content, "Look.");
  EXPECT_THAT(d.tool_calls, ElementsAre(AnswerToolCall{0, "functions.get_weather:0", "get_weather",
                                                       "{\"city\": \"Rome\"}"},
                                        AnswerToolCall{1, "odd id", "odd id", "{}"}));
}

TEST_F(LinearAnswerTest, ReadsBackWhatRenderWrites) {
  ChatRequest r;
  r.messages = {{.role = "user", .content = "q"}};
  const Ids prompt = *tokenizer->EncodeSegments(*format->Render(r));
  ChatMessage m{.role = "assistant", .content = "see <|im_end|>"};
  m.tool_calls = Json::array(
      {{{"id", "functions.a:b:0"},
        {"function", {{"name", "a:b"}, {"arguments", {{"k", "<|tool_call_end|>"}}}}}},
       {{"id", "functions.g:1"}, {"function", {{"name", "g"}, {"arguments", "{broken"}}}}});
  r.messages.push_back(m);
  r.add_generation_prompt = false;
  const Ids whole = *tokenizer->EncodeSegments(*format->Render(r));
  const Ids answer(whole.begin() + static_cast<int64_t>(prompt.size()), whole.end());
  std::mt19937_64 rng(3);
  for (size_t most : {1, 3, 1000}) {
    const auto parser = format->NewParser(r);
    const AnswerDelta d = ParseAll(*parser, answer, rng, most);
    EXPECT_EQ(d.content, m.content);
    EXPECT_THAT(d.tool_calls, ElementsAre(AnswerToolCall{0, "functions.a:b:0", "a:b",
                                                         "{\"k\": \"<|tool_call_end|>\"}"},
                                          AnswerToolCall{1, "functions.g:1", "g", "{broken"}));
  }
}

TEST_F(LinearAnswerTest, BrokenCallsBecomeContent) {
  const std::string call = kCall;
  for (const std::string& broken :
       {call, call + "id", call + "id" + kCallEnd, call + "id" + kArguments,
        call + "id" + kArguments + "{}", call + kArguments + "{}" + kCallEnd, call + call + "x",
        call + "id" + kArguments + kArguments, std::string("loose"), call + "id" + kSection}) {
    const AnswerDelta d = Parse(kSection + broken);
    EXPECT_TRUE(d.tool_calls.empty()) << broken;
    EXPECT_EQ(d.content, Shown(broken));
  }
  const AnswerDelta d =
      Parse(kSection + call + "id" + call + "f" + kArguments + "1" + kCallEnd + kSectionEnd);
  EXPECT_EQ(d.content, "id");
  EXPECT_THAT(d.tool_calls, ElementsAre(AnswerToolCall{0, "f", "f", "1"}));
  EXPECT_EQ(Parse(std::string("a") + kSection + call + "id" + kSectionEnd + "b").content, "aidb");
}

TEST_F(LinearAnswerTest, SpecialTokensOutOfPlaceAreHidden) {
  EXPECT_EQ(Parse(std::string("a") + kCall + kCallEnd + "b<|im_user|>c").content, "abc");
  EXPECT_EQ(Parse(std::string("a") + kSection + "b<|im_user|>" + kCallEnd + "c").content, "abc");
  const AnswerDelta d = Parse(std::string(kSection) + kCall + "f<|im_user|>:0" + kArguments +
                              "{<|im_middle|>}" + kCallEnd + kSectionEnd);
  EXPECT_EQ(d.content, "");
  EXPECT_THAT(d.tool_calls, ElementsAre(AnswerToolCall{0, "f:0", "f", "{}"}));
}

TEST_F(LinearAnswerTest, RandomTokensLoseNothing) {
  std::mt19937_64 rng(5);
  const TokenId section = *tokenizer->SpecialId(kSection);
  for (int round = 0; round < 300; ++round) {
    Ids ids;
    for (int i = 0; i < 200; ++i) {
      const auto id = static_cast<TokenId>(rng() % 768);
      if (id != section && !tokenizer->is_eos(id)) ids.push_back(id);
    }
    const auto parser = format->NewParser({});
    EXPECT_EQ(ParseAll(*parser, ids, rng, 9).content, Shown(ids));
  }
}

TEST_F(LinearAnswerTest, GroupingDoesNotMatter) {
  std::mt19937_64 rng(6);
  const std::vector<std::string> pieces = {
      kSection, kSectionEnd, kCall, kArguments, kCallEnd, "functions.f:0", "{}", "中é", " "};
  int calls = 0;
  for (int round = 0; round < 1000; ++round) {
    std::string soup = kSection;
    if (round % 4 == 0) soup += std::string(kCall) + "functions.f:0" + kArguments;
    for (int i = 0; i < 14; ++i) soup += pieces[rng() % pieces.size()];
    Ids ids;
    for (const TokenId id : Tokens(soup)) {
      if (rng() % 40 == 0) ids.push_back(static_cast<TokenId>(rng() % 768));
      ids.push_back(id);
    }
    const auto one = format->NewParser({});
    const auto many = format->NewParser({});
    const AnswerDelta a = ParseAll(*one, ids);
    const AnswerDelta b = ParseAll(*many, ids, rng, 50);
    ASSERT_EQ(a.content, b.content);
    ASSERT_EQ(a.tool_calls, b.tool_calls);
    calls += static_cast<int>(a.tool_calls.size());
  }
  EXPECT_GT(calls, 20);
}

}  // namespace
}  // namespace deltamesh

#include <gmock/gmock.h>

#include "tests/unit/text/chat_test_util.h"

namespace deltamesh {
namespace {

using Ids = std::vector<TokenId>;
using ::testing::ElementsAre;

class K3AnswerTest : public ::testing::Test {
 protected:
  K3AnswerTest()
      : tokenizer(GoldenTokenizer("kimi_k3")), format(GoldenFormat("kimi_k3", *tokenizer)) {}

  std::unique_ptr<AnswerParser> Parser(bool thinking) {
    ChatRequest r;
    r.thinking = thinking;
    return format->NewParser(r);
  }
  // Special names mean the tokens.
  Ids Tokens(const std::string& text) {
    return *tokenizer->EncodeSegments(std::vector<Segment>{{text, true}});
  }
  // "[tag]" and "[/tag]" stand for open and close headers.
  Ids Blocks(std::string text) {
    std::string out;
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '[') {
        const bool close = text[i + 1] == '/';
        out += close ? "<|close|>" : "<|open|>";
        if (close) ++i;
      } else if (text[i] == ']') {
        out += "<|sep|>";
      } else {
        out.push_back(text[i]);
      }
    }
    return Tokens(out);
  }
  AnswerDelta Parse(const std::string& blocks, bool thinking = true) {
    const auto parser = Parser(thinking);
    return ParseAll(*parser, Blocks(blocks));
  }
  // All text of `blocks`, structure or not; special tokens are none.
  std::string Raw(const std::string& blocks) { return Shown(Blocks(blocks)); }
  std::string Shown(Ids ids) {
    std::erase_if(ids, [&](TokenId id) { return tokenizer->is_special(id); });
    return tokenizer->Decode(ids);
  }

  std::unique_ptr<const Tokenizer> tokenizer;
  std::unique_ptr<const ChatFormat> format;
};

TEST_F(K3AnswerTest, ThinkThenResponse) {
  const AnswerDelta d = Parse("hm é[/think][response]Hello 中![/response][/message]<|end_of_msg|>");
  EXPECT_EQ(d.reasoning, "hm é");
  EXPECT_EQ(d.content, "Hello 中!");
  EXPECT_TRUE(d.tool_calls.empty());
}

TEST_F(K3AnswerTest, ResponseOnly) {
  const AnswerDelta d = Parse("Hello[/response][/message]", false);
  EXPECT_EQ(d.reasoning, "");
  EXPECT_EQ(d.content, "Hello");
}

TEST_F(K3AnswerTest, ThinkBlockAlthoughNotAsked) {
  const AnswerDelta d = Parse("[/response][think]hm[/think][response]x[/response]", false);
  EXPECT_EQ(d.reasoning, "hm");
  EXPECT_EQ(d.content, "x");
}

TEST_F(K3AnswerTest, ToolCalls) {
  const AnswerDelta d = Parse(
      "t[/think][response][/response][tools]"
      "[call tool=\"get&amp;&quot;x\" index=\"1\"]"
      "[argument key=\"city\" type=\"string\"]Rome \"c\"\n[/argument]"
      "[argument key=\"n\" type=\"number\"] 12345678901234567890123 [/argument]"
      "[argument key=\"o\" type=\"object\"]{\"a\": <1>}[/argument]"
      "[argument key=\"b\" type=\"boolean\"]true[/argument][/call]"
      "[call tool=\"raw\" index=\"2\"][json type=\"object\"]{not json[/json][/call]"
      "[call tool=\"none\" index=\"3\"]\n[/call][/tools][/message]");
  EXPECT_EQ(d.reasoning, "t");
  EXPECT_EQ(d.content, "");
  EXPECT_THAT(
      d.tool_calls,
      ElementsAre(
          AnswerToolCall{0, "call_0", "get&\"x",
                         "{\"city\": \"Rome \\\"c\\\"\\n\", \"n\":  12345678901234567890123 , "
                         "\"o\": \"{\\\"a\\\": <1>}\", \"b\": true}"},
          AnswerToolCall{1, "call_1", "raw", "{not json"},
          AnswerToolCall{2, "call_2", "none", "{}"}));
}

// What Render writes for an assistant message, the parser reads back.
TEST_F(K3AnswerTest, ReadsBackWhatRenderWrites) {
  for (const bool thinking : {true, false}) {
    ChatRequest r;
    r.thinking = thinking;
    ChatMessage m{
        .role = "assistant", .content = "done <|close|>", .reasoning_content = "why <|sep|>"};
    if (!thinking) m.reasoning_content.clear();
    const Json arguments = {{"k \"1\" & =\"", "v <|close|>argument<|sep|>"},
                            {"n", 1.5},
                            {"l", {1, nullptr}},
                            {"s", "17"},
                            {"e", ""},
                            {"o", Json::object()}};
    m.tool_calls =
        Json::array({{{"id", "x"}, {"function", {{"name", "f"}, {"arguments", arguments}}}},
                     {{"id", "y"}, {"function", {{"name", "g"}, {"arguments", "{broken"}}}}});
    r.messages = {{.role = "user", .content = "q"}};
    const Ids prompt = *tokenizer->EncodeSegments(*format->Render(r));
    r.messages.push_back(m);
    r.add_generation_prompt = false;
    const Ids whole = *tokenizer->EncodeSegments(*format->Render(r));
    ASSERT_TRUE(std::equal(prompt.begin(), prompt.end(), whole.begin()));
    const Ids answer(whole.begin() + static_cast<int64_t>(prompt.size()), whole.end());
    std::mt19937_64 rng(3);
    for (size_t most : {1, 2, 7, 1000}) {
      const auto parser = Parser(thinking);
      const AnswerDelta d = ParseAll(*parser, answer, rng, most);
      EXPECT_EQ(d.reasoning, m.reasoning_content);
      EXPECT_EQ(d.content, m.content);
      ASSERT_EQ(d.tool_calls.size(), 2);
      EXPECT_EQ(parser->tool_call_count(), 2);
      EXPECT_EQ(d.tool_calls[0].name, "f");
      EXPECT_EQ(Json::parse(d.tool_calls[0].arguments), arguments);
      EXPECT_EQ(d.tool_calls[1].arguments, "{broken");
    }
  }
}

TEST_F(K3AnswerTest, TextThatLooksLikeAMarkerIsText) {
  const Ids typed = *tokenizer->EncodeOrdinary("<|close|>think<|sep|>");
  const auto parser = Parser(true);
  EXPECT_EQ(ParseAll(*parser, typed).reasoning, "<|close|>think<|sep|>");
}

TEST_F(K3AnswerTest, MalformedStructureBecomesText) {
  // Unknown header, header with attributes, header cut by another marker, stray sep, at the end.
  EXPECT_EQ(Parse("a[/response]b").reasoning, Raw("a[/response]b"));
  EXPECT_EQ(Parse("a[think]b").reasoning, Raw("a[think]b"));
  EXPECT_EQ(Parse("a[/think x=\"1\"]b").reasoning, Raw("a[/think x=\"1\"]b"));
  EXPECT_EQ(Parse("a]b").reasoning, Raw("a]b"));
  EXPECT_EQ(Parse("a[th[/think][response]x").reasoning, Raw("a[th"));
  EXPECT_EQ(Parse("a[th[/think][response]x").content, "x");
  EXPECT_EQ(Parse("a[/thi").reasoning, Raw("a[/thi"));
  EXPECT_EQ(Parse("[PAD").reasoning, Raw("[PAD"));
  // Between blocks.
  EXPECT_EQ(Parse("[/think]loose[response]x[/response]more[call tool=\"f\"]").content,
            "loosexmore" + Raw("[call tool=\"f\"]"));
}

TEST_F(K3AnswerTest, SpecialTokensOutOfPlaceAreHidden) {
  EXPECT_EQ(Parse("a]]b[/think][response]c]d[/response]").reasoning, "ab");
  EXPECT_EQ(Parse("a]]b[/think][response]c]d[/response]").content, "cd");
  const AnswerDelta d = Parse(
      "[/think][tools][call tool=\"f\"]][argument key=\"k\" type=\"string\"]v]w[/argument][/call]"
      "[/tools]");
  EXPECT_EQ(d.content, "");
  EXPECT_THAT(d.tool_calls, ElementsAre(AnswerToolCall{0, "call_0", "f", "{\"k\": \"vw\"}"}));
}

TEST_F(K3AnswerTest, BrokenCallsBecomeContent) {
  const std::string before = "[/think][tools]";
  const std::string start = "[call tool=\"f\" index=\"1\"]";
  const std::string argument = "[argument key=\"k\" type=\"string\"]v[/argument]";
  for (const std::string& broken :
       {start, start + argument, start + "[argument key=\"k\" type=\"string\"]v", start + "loose",
        start + "[json type=\"object\"]{}", start + argument + "[json type=\"object\"]{}[/json]",
        start + "[/tools]", start + "[other]", std::string("[call]x"),
        std::string("[call tool=\"\"]"), start + "[argument type=\"string\"]", start + "[/ca"}) {
    const AnswerDelta d = Parse(before + broken);
    EXPECT_TRUE(d.tool_calls.empty()) << broken;
    EXPECT_EQ(d.content, Raw(broken));
  }
  // A good call after a broken one still counts.
  const AnswerDelta d =
      Parse(before + start + "oops[/call]" + start + argument + "[/call][/tools]");
  EXPECT_EQ(d.content, Raw(start + "oops[/call]"));
  EXPECT_THAT(d.tool_calls, ElementsAre(AnswerToolCall{0, "call_0", "f", "{\"k\": \"v\"}"}));
}

TEST_F(K3AnswerTest, RepeatedKeysKeepTheLastValue) {
  const std::string a = "[argument key=\"k\" type=\"number\"]1[/argument]";
  const std::string b = "[argument key=\"k\" type=\"number\"]2[/argument]";
  const AnswerDelta d = Parse("[/think][tools][call tool=\"f\" index=\"1\"]" + a + b + "[/call]");
  ASSERT_EQ(d.tool_calls.size(), 1);
  EXPECT_EQ(d.tool_calls[0].arguments, "{\"k\": 2}");
}

TEST_F(K3AnswerTest, EndlessHeaderIsText) {
  const auto parser = Parser(true);
  const std::string text = "<|close|>" + std::string(100'000, 'x');
  const AnswerDelta d = parser->Push(Tokens(text));
  EXPECT_GT(d.reasoning.size(), 80'000);  // not held back for ever
  EXPECT_EQ(d.reasoning + parser->Finish().reasoning, std::string(100'000, 'x'));
}

// Random tokens without any complete structure come out as their plain decoding.
TEST_F(K3AnswerTest, RandomTokensLoseNothing) {
  std::mt19937_64 rng(5);
  const TokenId sep = *tokenizer->SpecialId("<|sep|>");
  for (int round = 0; round < 300; ++round) {
    Ids ids;
    for (int i = 0; i < 200; ++i) {
      const auto id = static_cast<TokenId>(rng() % 768);
      if (id != sep && !tokenizer->is_eos(id)) ids.push_back(id);
    }
    const auto parser = Parser(round % 2 == 0);
    const AnswerDelta d = ParseAll(*parser, ids, rng, 9);
    EXPECT_EQ(d.reasoning + d.content, Shown(ids));
  }
}

// Random soup of structure pieces: never fails, and the grouping does not matter.
TEST_F(K3AnswerTest, GroupingDoesNotMatter) {
  std::mt19937_64 rng(6);
  const std::vector<std::string> pieces = {"[/think]",
                                           "[think]",
                                           "[response]",
                                           "[/response]",
                                           "[tools]",
                                           "[/tools]",
                                           "[/message]",
                                           "[call tool=\"f\" index=\"1\"]",
                                           "[/call]",
                                           "[argument key=\"k\" type=\"string\"]",
                                           "[argument key=\"j\" type=\"object\"]",
                                           "[/argument]",
                                           "[json type=\"object\"]",
                                           "[/json]",
                                           "text",
                                           "中é",
                                           " ",
                                           "[",
                                           "]",
                                           "{\"a\": 1}",
                                           "<|end_of_msg|>"};
  int calls = 0;
  for (int round = 0; round < 2000; ++round) {
    std::string soup = round % 4 == 0 ? "" : "[/think][tools][call tool=\"f\" index=\"1\"]";
    for (int i = 0; i < 12; ++i) soup += pieces[rng() % pieces.size()];
    Ids ids;
    for (const TokenId id : Blocks(soup + "é ")) {
      if (rng() % 40 == 0) ids.push_back(static_cast<TokenId>(rng() % 768));
      ids.push_back(id);
    }
    const auto one = Parser(true);
    const auto many = Parser(true);
    const AnswerDelta a = ParseAll(*one, ids);
    const AnswerDelta b = ParseAll(*many, ids, rng, 50);
    ASSERT_EQ(a.reasoning, b.reasoning);
    ASSERT_EQ(a.content, b.content);
    ASSERT_EQ(a.tool_calls, b.tool_calls);
    calls += static_cast<int>(a.tool_calls.size());
  }
  EXPECT_GT(calls, 20);  // the soup does make calls
}

}  // namespace
}  // namespace deltamesh

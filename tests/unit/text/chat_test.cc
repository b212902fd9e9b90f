// Prompts of both families against the golden cases and against the oracle on random requests.
#include "runtime/text/chat.h"

#include <cstdlib>

#include "tests/unit/text/chat_test_util.h"

namespace deltamesh {
namespace {

class ChatTest : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Families, ChatTest, ::testing::Values("kimi_k3", "kimi_linear"));

TEST_P(ChatTest, GoldenCases) {
  const auto tokenizer = GoldenTokenizer(GetParam());
  const auto format = GoldenFormat(GetParam(), *tokenizer);
  EXPECT_EQ(format->family(), GetParam());
  const Json golden = GoldenJson(GetParam())["chat"];
  ASSERT_EQ(golden.size(), GetParam() == "kimi_k3" ? 4 : 2);
  for (const Json& c : golden) {
    const auto segments = format->Render(RequestFromJson(c["request"]));
    ASSERT_TRUE(segments.ok()) << segments.status();
    std::string text;
    for (const Segment& s : *segments) {
      text += s.text;
      EXPECT_FALSE(s.text.empty());
      EXPECT_TRUE(!s.special || tokenizer->SpecialId(s.text).has_value()) << s.text;
    }
    EXPECT_EQ(text, c["text"].get<std::string>());
    EXPECT_EQ(*tokenizer->EncodeSegments(*segments), c["ids"].get<std::vector<TokenId>>());
  }
}

TEST(ChatOracleTest, EqualsTheOracleOnRandomRequests) {
  constexpr int kCases = 3000;
  TempFolder folder;
  const std::string source = DELTAMESH_SOURCE_DIR;
  const std::string out = (folder.path() / "cases.json").string();
  const std::string command = absl::StrFormat(
      "/usr/bin/python3 -B '%s/tests/unit/text/chat_oracle.py' "
      "'%s/tests/data/reference.py' %d '%s'",
      source, source, kCases, out);
  ASSERT_EQ(std::system(command.c_str()), 0) << command << " failed; is python3-numpy installed?";
  const Json cases = Json::parse(ReadAll(out));
  ASSERT_EQ(cases.size(), kCases);
  std::map<std::string, std::unique_ptr<const Tokenizer>> tokenizers;
  std::map<std::string, std::unique_ptr<const ChatFormat>> formats;
  for (const std::string family : {"kimi_k3", "kimi_linear"}) {
    tokenizers[family] = GoldenTokenizer(family);
    formats[family] = GoldenFormat(family, *tokenizers[family]);
  }
  for (const Json& c : cases) {
    const auto got = formats[c["family"].get<std::string>()]->Render(RequestFromJson(c["request"]));
    ASSERT_TRUE(got.ok()) << got.status() << "\n" << c["request"].dump(1);
    std::vector<Segment> want;
    for (const Json& s : c["segments"]) {
      want.push_back({s[0].get<std::string>(), s[1].get<bool>()});
    }
    ASSERT_EQ(got->size(), want.size()) << c["request"].dump(1);
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ((*got)[i].text, want[i].text) << c["request"].dump(1);
      ASSERT_EQ((*got)[i].special, want[i].special) << c["request"].dump(1);
    }
  }
}

// The string of a marker in any field a user controls never becomes the marker.
TEST_P(ChatTest, MarkersInUserFieldsStayText) {
  const auto tokenizer = GoldenTokenizer(GetParam());
  const auto format = GoldenFormat(GetParam(), *tokenizer);
  const auto count_special = [&](const std::string& s) {
    ChatRequest r;
    r.tools = Json::array({{{"type", "function"}, {"function", {{"name", s}, {s, s}}}}});
    r.messages.push_back({.role = "system", .content = s, .name = s});
    r.messages.push_back({.role = "user", .content = s, .name = s});
    ChatMessage m{.role = "assistant", .content = s, .reasoning_content = s};
    m.tool_calls = Json::array({{{"id", s}, {"function", {{"name", s}, {"arguments", {{s, s}}}}}}});
    r.messages.push_back(m);
    r.messages.push_back({.role = "tool", .content = s, .tool_call_id = s});
    const auto segments = format->Render(r);
    CHECK_OK(segments.status());
    int special = 0;
    const auto ids = *tokenizer->EncodeSegments(*segments);
    for (const TokenId id : ids) special += tokenizer->is_special(id);
    return special;
  };
  const int plain = count_special("x");
  for (TokenId id = 512; id < 768; ++id) {
    ASSERT_EQ(count_special(std::string(tokenizer->TokenBytes(id))), plain) << id;
  }
}

TEST(ChatK3Test, MediumEffortIsHigh) {
  const auto tokenizer = GoldenTokenizer("kimi_k3");
  const auto format = GoldenFormat("kimi_k3", *tokenizer);
  ChatRequest r;
  r.messages.push_back({.role = "user", .content = "hi"});
  r.effort = "high";
  const auto high = *format->Render(r);
  r.effort = "medium";
  EXPECT_EQ(*format->Render(r), high);
  r.effort = "low";
  EXPECT_NE(*format->Render(r), high);
}

TEST(ChatLinearTest, ToolChoiceNoneHidesTheTools) {
  const auto tokenizer = GoldenTokenizer("kimi_linear");
  const auto format = GoldenFormat("kimi_linear", *tokenizer);
  ChatRequest r;
  r.messages.push_back({.role = "user", .content = "hi"});
  const auto without = *format->Render(r);
  r.tools = Json::array({{{"type", "function"}, {"function", {{"name", "f"}}}}});
  EXPECT_NE(*format->Render(r), without);
  r.tool_choice = "none";
  EXPECT_EQ(*format->Render(r), without);
}

TEST(ChatMessagesFromJsonTest, ContentForms) {
  const auto m = ChatMessagesFromJson(Json::parse(R"([
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": null, "refusal": null, "tool_calls": null}, {"role": "user"}])"));
  ASSERT_TRUE(m.ok()) << m.status();
  EXPECT_EQ((*m)[0].content, "ab");
  EXPECT_EQ((*m)[1].content, "");
  EXPECT_EQ((*m)[2].content, "");
}

TEST(ChatMessagesFromJsonTest, MessagesAreBounded) {
  Json messages = Json::array();
  for (int64_t i = 0; i < kChatMessagesMax; ++i) messages.push_back({{"role", "user"}});
  EXPECT_TRUE(ChatMessagesFromJson(messages).ok());
  messages.push_back({{"role", "user"}});
  EXPECT_EQ(ChatMessagesFromJson(messages).status().ToString(),
            "INVALID_ARGUMENT: messages: 65537; send at most 65536");
}

// Results look for the calls that they answer: minutes, if each of many looked at all of many.
TEST(ChatK3Test, ManyResultsOfManyCallsAreRenderedInAMoment) {
  const auto tokenizer = GoldenTokenizer("kimi_k3");
  const auto format = GoldenFormat("kimi_k3", *tokenizer);
  ChatRequest r;
  ChatMessage calls;
  calls.role = "assistant";
  calls.tool_calls = Json::array();
  for (int i = 0; i < 100'000; ++i) {
    calls.tool_calls.push_back(
        {{"id", std::to_string(i)}, {"type", "function"}, {"function", {{"name", "f"}}}});
  }
  r.messages.push_back(std::move(calls));
  for (int i = 0; i < 20'000; ++i) {
    ChatMessage result, next;
    result.role = "tool";
    result.tool_call_id = std::to_string(i);
    result.content = "ok";
    next.role = "user";
    next.content = "go on";
    r.messages.push_back(std::move(result));
    r.messages.push_back(std::move(next));
  }
  const auto segments = format->Render(r);
  EXPECT_TRUE(segments.ok()) << segments.status();
}

}  // namespace
}  // namespace deltamesh

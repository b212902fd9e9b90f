// Every way a chat request or a checkpoint's chat files can be wrong.
#include "tests/unit/text/chat_test_util.h"

namespace deltamesh {
namespace {

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

struct Case {
  const char* request;             // JSON, the messages key left out unless it is the point
  std::vector<std::string> words;  // of the error
};

absl::Status RenderStatus(const ChatFormat& format, const std::string& text) {
  Json json = Json::parse(text);
  if (!json.contains("messages")) json["messages"] = {{{"role", "user"}, {"content", "x"}}};
  const auto messages = ChatMessagesFromJson(json["messages"]);
  if (!messages.ok()) return messages.status();
  return format.Render(RequestFromJson(json)).status();
}

void ExpectErrors(const std::string& family, const std::vector<Case>& cases) {
  const auto tokenizer = GoldenTokenizer(family);
  const auto format = GoldenFormat(family, *tokenizer);
  ASSERT_TRUE(RenderStatus(*format, "{}").ok());
  for (const Case& c : cases) {
    const absl::Status status = RenderStatus(*format, c.request);
    EXPECT_EQ(status.code(), kInvalid) << c.request << " gave " << status;
    for (const std::string& word : c.words) {
      EXPECT_NE(MessageOf(status).find(word), std::string::npos)
          << "no " << word << " in " << status << "\n"
          << c.request;
    }
  }
}

const std::vector<Case>& CommonCases() {
  static const std::vector<Case> cases = {
      {R"({"messages": []})", {"messages: empty", "at least one"}},
      {R"({"messages": {}})", {"messages:", "object", "array"}},
      {R"({"messages": ["x"]})", {"messages[0]", "string", "object"}},
      {R"({"messages": [{"role": "user"}, {"role": "developer"}]})",
       {"messages[1].role", "\"developer\"", "system, user, assistant or tool"}},
      {R"({"messages": [{"content": "x"}]})", {"messages[0].role", "\"\""}},
      {R"({"messages": [{"role": 5}]})", {"messages[0].role", "number"}},
      {R"({"messages": [{"role": "user", "content": 5}]})", {"messages[0].content", "number"}},
      {R"({"messages": [{"role": "user", "content": ["x"]}]})",
       {"messages[0].content[0]", "string"}},
      {R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})",
       {"messages[0].content[0].type", "image_url", "text"}},
      {R"({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]})",
       {"messages[0].content[0].text", "number"}},
      {R"({"messages": [{"role": "user", "name": []}]})", {"messages[0].name", "array"}},
      {R"({"messages": [{"role": "user", "reasoning_content": "x"}]})",
       {"messages[0].reasoning_content", "\"user\"", "assistant"}},
      {R"({"messages": [{"role": "user", "tool_calls": [{}]}]})",
       {"messages[0].tool_calls", "assistant"}},
      {R"({"messages": [{"role": "user", "tool_call_id": "x"}]})",
       {"messages[0].tool_call_id", "tool"}},
      {R"({"messages": [{"role": "user", "tools": [{}]}]})", {"messages[0].tools", "system"}},
      {R"({"messages": [{"role": "assistant", "tool_calls": "x"}]})",
       {"messages[0].tool_calls", "string", "array"}},
      {R"({"messages": [{"role": "assistant", "tool_calls": ["x"]}]})",
       {"messages[0].tool_calls[0]"}},
      {R"({"messages": [{"role": "assistant", "tool_calls": [{"id": 1}]}]})",
       {"messages[0].tool_calls[0].id", "number"}},
      {R"({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": "f"}]}]})",
       {"messages[0].tool_calls[0].function"}},
      {R"({"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {}}]}]})",
       {"messages[0].tool_calls[0].function.name", "missing"}},
      {R"({"messages": [{"role": "assistant", "tool_calls":
          [{"id": "a", "function": {"name": "f", "arguments": [1]}}]}]})",
       {"messages[0].tool_calls[0].function.arguments", "array"}},
      {R"({"messages": [{"role": "system", "tools": "x"}]})", {"messages[0].tools", "array"}},
      {R"({"tools": {"type": "function"}})", {"tools", "object", "array"}},
      {R"({"tools": ["x"]})", {"tools[0]", "object"}},
      {R"({"thinking_effort": "huge"})", {"effort", "\"huge\"", "low, medium", "high or max"}},
      {R"({"tools": [{}]})", {"tools[0].type", "function"}},
      {R"({"tools": [{"type": "web", "function": {"name": "f"}}]})", {"tools[0].type", "\"web\""}},
      {R"({"tools": [{"type": "function"}]})", {"tools[0].function", "missing"}},
      {R"({"tools": [{"type": "function", "function": {}}]})",
       {"tools[0].function.name", "missing"}},
      {R"({"tools": [{"type": "function", "function": {"name": 1}}]})",
       {"tools[0].function.name", "number"}},
      {R"({"tool_choice": "force"})", {"tool_choice", "\"force\"", "auto, none or required"}},
      {R"({"response_format": 3})", {"response_format", "number"}},
      {R"({"response_format": {"type": "xml"}})",
       {"response_format.type", "\"xml\"", "json_schema"}},
      {R"({"response_format": {}})", {"response_format.type", "\"\""}},
      {R"({"response_format": {"type": 1}})", {"response_format.type", "number"}},
      {R"({"response_format": "json_schema"})", {"response_format.json_schema", "missing"}},
      {R"({"response_format": {"type": "json_schema", "json_schema": []}})",
       {"response_format.json_schema", "not an object"}},
  };
  return cases;
}

TEST(ChatErrorTest, BothFamilies) {
  ExpectErrors("kimi_k3", CommonCases());
  ExpectErrors("kimi_linear", CommonCases());
}

TEST(ChatErrorTest, K3) {
  ExpectErrors(
      "kimi_k3",
      {{R"({"messages": [{"role": "tool", "tool_call_id": "c9"}]})",
        {"messages[0].tool_call_id", "\"c9\"", "messages[0].name"}},
       {R"({"messages": [{"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f"}}]},
          {"role": "tool", "tool_call_id": "c1"}, {"role": "tool", "tool_call_id": "c2"}]})",
        {"messages[2].tool_call_id", "\"c2\""}}});
}

TEST(ChatErrorTest, Linear) {
  ExpectErrors(
      "kimi_linear",
      {{R"({"messages": [{"role": "tool", "content": "x"}]})",
        {"messages[0].tool_call_id", "missing"}},
       {R"({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]})",
        {"messages[0].tool_calls[0].id", "functions.NAME:N"}},
       {R"({"messages": [{"role": "system", "tools":
          [{"type": "function", "function": {"name": "f"}}]}]})",
        {"messages[0].tools"}},
       {R"({"thinking": true})", {"thinking", "no thinking block"}},
       {R"({"thinking_effort": "low"})", {"effort", "leave it out"}},
       {R"({"tool_choice": "required"})", {"tool_choice", "auto or none"}},
       {R"({"response_format": "json_object"})", {"response_format", "json_object", "text"}}});
}

TEST(ChatErrorTest, TextThatIsNotUtf8) {
  for (const std::string family : {"kimi_k3", "kimi_linear"}) {
    const auto tokenizer = GoldenTokenizer(family);
    const auto format = GoldenFormat(family, *tokenizer);
    const std::string bad = "ab\xff";
    const auto check = [&](ChatMessage m, const std::string& field) {
      ChatRequest r;
      r.messages.push_back({.role = "user", .content = "x"});
      r.messages.push_back(std::move(m));
      ExpectError(format->Render(r).status(), kInvalid, {"messages[1]." + field, "byte 2 (0xff)"});
    };
    check({.role = "user", .content = bad}, "content");
    check({.role = "user", .name = bad}, "name");
    check({.role = "assistant", .reasoning_content = bad}, "reasoning_content");
    check({.role = "tool", .tool_call_id = bad}, "tool_call_id");
    ChatMessage m{.role = "assistant"};
    m.tool_calls = Json::array({{{"id", "a"}, {"function", {{"name", "f"}, {"arguments", bad}}}}});
    check(m, "tool_calls[0].function.arguments");
  }
}

TEST(ChatLiteralsTest, MissingTextsMatterOnlyWhenNeeded) {
  BrokenCheckpoint c("kimi_k3");
  std::filesystem::remove(c.path() / "chat_literals.json");
  const auto tokenizer = GoldenTokenizer("kimi_k3");
  const auto format = ChatFormat::Load(c.path(), *tokenizer);
  ASSERT_TRUE(format.ok()) << format.status();
  EXPECT_TRUE(RenderStatus(**format, R"({"thinking": false})").ok());
  struct {
    const char* request;
    std::string field;
    std::string key;
  } const cases[] = {
      {R"({})", "thinking", "thinking_effort"},
      {R"({"thinking": false, "tools": [{"type": "function", "function": {"name": "f"}}]})",
       "tools", "tools"},
      {R"({"thinking": false, "messages": [{"role": "system", "tools":
          [{"type": "function", "function": {"name": "f"}}]}]})",
       "messages[0].tools", "tools_dynamic"},
      {R"({"thinking": false, "tool_choice": "none"})", "tool_choice", "tool_choice_none"},
      {R"({"thinking": false, "tool_choice": "required"})", "tool_choice", "tool_choice_required"},
      {R"({"thinking": false, "response_format": "json_object"})", "response_format",
       "response_json_object"},
      {R"({"thinking": false, "response_format": {"type": "json_schema", "json_schema": {}}})",
       "response_format", "response_json_schema"}};
  for (const auto& k : cases) {
    ExpectError(RenderStatus(**format, k.request), absl::StatusCode::kFailedPrecondition,
                {k.field + ": ", "\"" + k.key + "\"", "chat_literals.json", "encoding_k3.py"});
  }
}

TEST(ChatLiteralsTest, MalformedFileIsRefusedAtLoad) {
  const auto tokenizer = GoldenTokenizer("kimi_k3");
  const auto expect = [&](const std::function<void(BrokenCheckpoint&)>& spoil,
                          std::initializer_list<std::string> words) {
    BrokenCheckpoint c("kimi_k3");
    spoil(c);
    ExpectError(ChatFormat::Load(c.path(), *tokenizer).status(), kInvalid, words);
  };
  const auto edit = [](const char* key, const Json& value) {
    return [=](BrokenCheckpoint& c) {
      c.Edit("chat_literals.json", [&](Json& v) { v[key] = value; });
    };
  };
  expect(edit("tools", "no hole"), {"chat_literals.json", "tools", "0 holes", "must have 1"});
  expect(edit("tools", "%s %s"), {"tools", "2 holes", "must have 1"});
  expect(edit("tool_choice_none", "a %s"), {"tool_choice_none", "1 holes", "must have 0"});
  expect(edit("thinking_effort", 5), {"thinking_effort", "not a string"});
  expect([](auto& c) { WriteAll(c.path() / "chat_literals.json", "[]"); }, {"not an object"});
  expect([](auto& c) { WriteAll(c.path() / "chat_literals.json", "{"); }, {"not valid JSON"});
  expect([](auto& c) { WriteAll(c.path() / "config.json", "[]"); },
         {"config.json", "not an object"});
}

TEST(ChatLiteralsTest, TokenizerOfAnotherFamilyIsRefused) {
  const auto linear = GoldenTokenizer("kimi_linear");
  const auto k3 = GoldenTokenizer("kimi_k3");
  ExpectError(ChatFormat::Load(GoldenFolder("kimi_k3"), *linear).status(), kInvalid, {"<|open|>"});
  ExpectError(ChatFormat::Load(GoldenFolder("kimi_linear"), *k3).status(), kInvalid,
              {"<|im_end|>"});
  TempFolder empty;
  ExpectError(ChatFormat::Load(empty.path(), *k3).status(), absl::StatusCode::kNotFound,
              {"config.json"});
}

}  // namespace
}  // namespace deltamesh

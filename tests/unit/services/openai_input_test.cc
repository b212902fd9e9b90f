// What the OpenAI endpoints refuse, before any work, and by which name.
#include "absl/synchronization/notification.h"
#include "tests/unit/services/openai_fixture.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

using OpenAiInputTest = OpenAiHttpTest;

TEST_F(OpenAiInputTest, BadInputNamesTheFieldBeforeAnyWork) {
  Start();
  struct Case {
    const char* more;
    int status;
    const char* param;
  };
  const std::vector<Case> cases = {
      {R"("temperature": 3)", 400, "temperature"},
      {R"("temperature": "hot")", 400, "temperature"},
      {R"("top_p": 0)", 400, "top_p"},
      {R"("top_p": 1.5)", 400, "top_p"},
      {R"("top_k": -2)", 400, "top_k"},
      {R"("top_k": 1.5)", 400, "top_k"},
      {R"("min_p": -1)", 400, "min_p"},
      {R"("presence_penalty": 3)", 400, "presence_penalty"},
      {R"("frequency_penalty": -3)", 400, "frequency_penalty"},
      {R"("repetition_penalty": 0)", 400, "repetition_penalty"},
      {R"("max_tokens": 0)", 400, "max_tokens"},
      {R"("max_tokens": "5")", 400, "max_tokens"},
      {R"("max_completion_tokens": -5)", 400, "max_completion_tokens"},
      {R"("n": 2)", 400, "n"},
      {R"("seed": 1.5)", 400, "seed"},
      {R"("stop": 5)", 400, "stop"},
      {R"("stop": ["a", 5])", 400, "stop[1]"},
      {R"("stop": [""])", 400, "stop[0]"},
      {R"("logit_bias": {"x": 1})", 400, "logit_bias"},
      {R"("logit_bias": {"5": 101})", 400, "logit_bias"},
      {R"("logit_bias": {"99999999": 1})", 400, "logit_bias"},
      {R"("logprobs": 1)", 400, "logprobs"},
      {R"("top_logprobs": 1)", 400, "top_logprobs"},
      {R"("logprobs": true, "top_logprobs": 21)", 400, "top_logprobs"},
      {R"("stream": 1)", 400, "stream"},
      {R"("stream_options": {"include_usage": true})", 400, "stream_options"},
      {R"("tools": {})", 400, "tools"},
      {R"("tools": [{"function": {"name": "f"}}])", 400, "tools[0].type"},
      {R"("tools": [{"type": "function", "function": {}}])", 400, "tools[0].function.name"},
      {R"("reasoning_effort": "huge")", 400, "reasoning_effort"},
      {R"("reasoning_effort": "high")", 400, "reasoning_effort"},
      {R"("tool_choice": {"type": "function"})", 400, "tool_choice"},
      {R"("model": "gpt-4")", 404, "model"},
      {R"("model": 4)", 400, "model"},
      {R"("temperature": 1e308)", 400, "temperature"},
      {R"("user": 1)", 400, "user"},
      {R"("functions": [])", 400, "functions"},
      {R"("modalities": ["audio"])", 400, "modalities"},
      {R"("chat_template_kwargs": 1)", 400, "chat_template_kwargs"},
      {R"("messages": [])", 400, "messages"},
      {R"("messages": "x")", 400, "messages"},
      {R"("messages": [{"role": "user", "content": 5}])", 400, "messages[0].content"},
  };
  for (const Case& c : cases) {
    const auto r = Chat(c.more);
    EXPECT_EQ(r.status, c.status) << c.more << " " << r.body;
    const Json e = Json::parse(r.body);
    EXPECT_EQ(e["error"]["param"], c.param) << c.more << " " << r.body;
    EXPECT_EQ(e["error"]["type"], "invalid_request_error");
    EXPECT_THAT(e["error"]["message"].get<std::string>(), HasSubstr(c.param));
  }
  for (const char* name : {"prompt_cache_key", "cache_salt"}) {
    const auto r = Chat("\"" + std::string(name) + "\": \"" + std::string(257, 'x') + "\"");
    EXPECT_EQ(Json::parse(r.body)["error"]["param"], name) << r.body;
  }
  const std::vector<std::pair<std::string, std::string>> completions = {
      {R"({"prompt": 5})", "prompt"},
      {R"({})", "prompt"},
      {R"({"prompt": ["a", "b"]})", "prompt"},
      {R"({"prompt": []})", "prompt"},
      {R"({"prompt": ""})", "prompt"},
      {R"({"prompt": [1, -1]})", "prompt[1]"},
      {R"({"prompt": [1, "a"]})", "prompt[1]"},
      {R"({"prompt": [1, 1099511627776]})", "prompt[1]"},
      {R"({"prompt": "a", "echo": true})", "echo"},
      {R"({"prompt": "a", "best_of": 3})", "best_of"},
      {R"({"prompt": "a", "logprobs": 21})", "logprobs"},
      {R"({"prompt": "a", "stop_token_ids": [99999999]})", "stop_token_ids[0]"},
  };
  for (const auto& [body, param] : completions) {
    const auto r = Post("/v1/completions", body);
    EXPECT_EQ(r.status, 400) << body;
    EXPECT_EQ(Json::parse(r.body)["error"]["param"], param) << body << r.body;
  }
  EXPECT_EQ(mesh->started().size(), 0u);
}

TEST_F(OpenAiInputTest, BrokenBodiesAreRefused) {
  Start();
  const std::string deep = R"({"prompt": )" + std::string(1000, '[') + std::string(1000, ']') + "}";
  for (const std::string& body :
       {std::string("{"), std::string(""), std::string("[1]"), std::string("null"),
        std::string("{\"a\":1}x"), std::string("{\"prompt\": \"\xff\xfe\"}"), deep}) {
    const auto r = Post("/v1/completions", body);
    EXPECT_EQ(r.status, 400) << body.substr(0, 40);
    EXPECT_EQ(Json::parse(r.body)["error"]["type"], "invalid_request_error");
  }
  EXPECT_EQ(Post("/v1/embeddings", "{}").status, 404);
  EXPECT_EQ(Post("/v1/models", "{}").status, 405);
  RawHttp client(server->port());
  client.Send(RawHttp::Get("/v1/chat/completions"));
  EXPECT_EQ(client.ReadResponse().status, 405);
}

TEST_F(OpenAiInputTest, InputsThatCannotBeServedAreRefusedBeforeTokenising) {
  Start("kimi_linear_tiny", false);
  absl::Notification release;
  ASSERT_TRUE(mesh->pool.Post([&] { release.WaitForNotification(); }).ok());
  const std::string large = R"({"prompt": ")" + std::string(1 << 20, 'x') + "\"}";
  EXPECT_EQ(Post("/v1/completions", large).status, 503);  // at once: no worker
  release.Notify();
  mesh->Join();
  const auto r = Post("/v1/completions", large);
  EXPECT_EQ(r.status, 400);
  EXPECT_EQ(Json::parse(r.body)["error"]["param"], "prompt");
  EXPECT_THAT(r.body, HasSubstr("1048576 bytes of text; a context of 2048 tokens holds at most"));
}

TEST_F(OpenAiInputTest, AChatThatIsTooLongNamesItsMessages) {
  Start();
  std::string text;
  while (text.size() < 6000) text += "q!";
  const auto r = Chat(R"("messages":[{"role":"user","content":")" + text + "\"}]");
  EXPECT_EQ(Json::parse(r.body)["error"]["param"], "messages") << r.body;
}

TEST_F(OpenAiInputTest, MessagesNameTheWholeRangeAndAllDigits) {
  Start();
  const std::vector<std::pair<const char*, const char*>> cases = {
      {R"("max_tokens": 0)", "use 1 to 2147483647"},
      {R"("max_tokens": 3.0000000001)", "the number 3.0000000001"},
      {R"("top_p": 0)", "top_p: 0 is out of range; use more than 0, up to 1"},
      {R"("top_p": 1.5)", "use more than 0, up to 1"},
      {R"("temperature": 2.0000002)", "temperature: 2.0000002 is out of range; use 0 to 2"},
      {R"("logit_bias": {"x": 1})", "from 0, below the vocabulary size"},
      {R"("top_k": -2)", "use 1 to 2147483647, or 0 or -1 for no limit"},
  };
  for (const auto& [more, expected] : cases) {
    const Json e = Json::parse(Chat(more).body);
    EXPECT_THAT(e["error"]["message"].get<std::string>(), HasSubstr(expected));
  }
}

// One rule for every field that holds an integer.
TEST_F(OpenAiInputTest, WholeNumbersMayBeWrittenAsFloats) {
  Start();
  const std::vector<std::pair<std::string, std::string>> cases = {
      // (before the number, after it)
      {R"({"prompt": "a", "max_tokens": )", "}"},
      {R"({"prompt": "a", "top_k": )", "}"},
      {R"({"prompt": "a", "seed": )", "}"},
      {R"({"prompt": "a", "n": )", "}"},
      {R"({"prompt": "a", "best_of": )", "}"},
      {R"({"prompt": "a", "logprobs": )", "}"},
      {R"({"prompt": "a", "stop_token_ids": [)", "]}"},
      {R"({"prompt": [)", "]}"},
      {R"({"prompt": [[)", "]]}"},
      {R"({"messages": [{"role": "user", "content": "a"}], "max_tokens": )", "}"},
      {R"({"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": )", "}"},
      {R"({"messages": [{"role": "user", "content": "a"}], "logprobs": true, "top_logprobs": )",
       "}"},
  };
  for (const auto& [before, after] : cases) {
    const char* path =
        before.find("messages") == before.npos ? "/v1/completions" : "/v1/chat/completions";
    for (const char* number : {"1", "1.0", "1e0", "10e-1"}) {
      const auto r = Post(path, before + number + after);
      EXPECT_EQ(r.status, 200) << before << number << " " << r.body;
    }
    for (const char* number : {"1.5", "1e300", "1e16", "true", "{}"}) {
      const auto r = Post(path, before + number + after);
      EXPECT_EQ(r.status, 400) << before << number;
      EXPECT_THAT(r.body, HasSubstr("whole number")) << before << number << " " << r.body;
    }
  }
  const std::vector<std::pair<const char*, uint64_t>> seeds = {
      {"7.0", 7},
      {"-1.0", ~uint64_t{0}},
      {"-1", ~uint64_t{0}},
      {"18446744073709551615", ~uint64_t{0}},
      {"9007199254740991.0", (uint64_t{1} << 53) - 1},
  };
  for (const auto& [text, seed] : seeds) {
    Chat("\"seed\": " + std::string(text));
    EXPECT_EQ(mesh->started().back().sampling().seed(), seed) << text;
  }
}

TEST_F(OpenAiInputTest, BodiesThatDoNotSayTheyAreJsonAreRefused) {
  Start();
  const auto post = [this](const std::string& path, const std::string& header) {
    const std::string body = R"({"prompt": "a", "messages": [{"role": "user", "content": "a"}]})";
    RawHttp client(server->port());
    client.Send("POST " + path + " HTTP/1.1\r\nHost: t\r\n" + header +
                "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
    return client.ReadResponse();
  };
  for (const char* path : {"/v1/completions", "/v1/chat/completions"}) {
    for (const char* type :
         {"application/json", "Application/JSON ; charset=utf-8", "application/vnd.api+json"}) {
      EXPECT_EQ(post(path, "Content-Type: " + std::string(type) + "\r\n").status, 200) << type;
    }
    // curl's own, those a web page may send unasked, and none.
    for (const char* header :
         {"Content-Type: application/x-www-form-urlencoded\r\n", "Content-Type: text/plain\r\n",
          "Content-Type: multipart/form-data; boundary=application/json\r\n",
          "Content-Type: application/jsonp\r\n", "Content-Type: text/html+json\r\n", ""}) {
      const size_t before = mesh->started().size();
      const auto r = post(path, header);
      EXPECT_EQ(r.status, 415) << header;
      const Json e = Json::parse(r.body);
      EXPECT_EQ(e["error"]["type"], "invalid_request_error");
      EXPECT_EQ(e["error"]["param"], "Content-Type");
      EXPECT_THAT(e["error"]["message"].get<std::string>(),
                  HasSubstr("send the header \"Content-Type: application/json\""));
      EXPECT_EQ(mesh->started().size(), before);
    }
  }
}

}  // namespace
}  // namespace deltamesh

// The OpenAI endpoints over real HTTP, in front of a scripted decode worker.
#include "services/router/openai_http.h"

#include "absl/synchronization/notification.h"
#include "services/common/http_ops.h"
#include "tests/unit/services/fake_mesh.h"
#include "tests/unit/services/raw_http.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

class OpenAiHttpTest : public ::testing::Test {
 protected:
  void Start(const std::string& model = "kimi_linear_tiny", bool join = true) {
    mesh = std::make_unique<FakeMesh>(model, options);
    if (script) mesh->script = script;
    if (join) mesh->Join();
    api = std::make_unique<OpenAiHttp>(mesh->front.get(), mesh->router.get(), &mesh->pool);
    ops = std::make_unique<HttpOps>(
        &mesh->metrics, [this] { return mesh->router->snapshot().ready; }, [] {}, api.get());
    auto started = HttpServer::Start({}, ops.get());
    ASSERT_TRUE(started.ok());
    server = *std::move(started);
  }
  void TearDown() override {
    server.reset();
    mesh.reset();
  }

  RawHttp::Response Post(const std::string& path, const std::string& body) {
    RawHttp client(server->port());
    client.Send(RawHttp::Post(path, body));
    return client.ReadResponse();
  }
  RawHttp::Response Chat(const std::string& more = "") {
    return Post("/v1/chat/completions", R"({"messages":[{"role":"user","content":"Hi"}])" +
                                            (more.empty() ? "" : "," + more) + "}");
  }
  static std::vector<Json> Events(const std::string& body, bool* done = nullptr) {
    std::vector<Json> out;
    size_t at = 0;
    while ((at = body.find("data: ", at)) != body.npos) {
      const size_t end = body.find("\n\n", at);
      const std::string data = body.substr(at + 6, end - at - 6);
      if (data == "[DONE]") {
        if (done != nullptr) *done = true;
      } else {
        out.push_back(Json::parse(data));
      }
      at = end;
    }
    return out;
  }

  RouterOptions options;
  std::function<Script(const mesh::StartDecode&)> script;
  std::unique_ptr<FakeMesh> mesh;
  std::unique_ptr<OpenAiHttp> api;
  std::unique_ptr<HttpOps> ops;
  std::unique_ptr<HttpServer> server;
};

TEST_F(OpenAiHttpTest, CacheHintsReachTheWorkers) {
  Start();
  Chat(R"("prompt_cache_key": "one")");
  Chat(R"("prompt_cache_key": "two")");
  Chat(R"("prompt_cache_key": "one", "cache_salt": "s")");
  RawHttp client(server->port());
  const std::string body = R"({"messages":[{"role":"user","content":"Hi"}]})";
  std::string request = RawHttp::Post("/v1/chat/completions", body);
  request.insert(request.find("\r\n") + 2, "X-Claude-Code-Session-Id: one\r\n");
  client.Send(request);
  EXPECT_EQ(client.ReadResponse().status, 200);
  Chat();
  const auto started = mesh->started();
  ASSERT_EQ(started.size(), 5u);
  const uint64_t one = started[0].cache().session();
  EXPECT_NE(one, 0u);
  EXPECT_NE(started[1].cache().session(), one);
  EXPECT_NE(started[2].cache().session(), one) << "another tenant's";
  EXPECT_EQ(started[2].cache().salt(), "s");
  EXPECT_EQ(started[3].cache().session(), one) << "an agent's header names it too";
  EXPECT_EQ(started[4].cache().session(), 0u);
  EXPECT_THAT(Chat(R"("cache_salt": 5)").body, HasSubstr("cache_salt"));
  EXPECT_THAT(Chat("\"prompt_cache_key\": \"" + std::string(257, 'x') + "\"").body,
              HasSubstr("cache.session: 257 bytes"));
}

TEST_F(OpenAiHttpTest, TheEndOfToolsAndSystemTextIsABreakpoint) {
  Start();
  const auto ask = [&](const std::string& system, const std::string& user) {
    const std::string first =
        system.empty() ? "" : R"({"role":"system","content":")" + system + "\"},";
    Post("/v1/chat/completions",
         R"({"messages":[)" + first + R"({"role":"user","content":")" + user + "\"}]}");
    return mesh->started().back();
  };
  const mesh::StartDecode a = ask("You are short.", "Hello"), b = ask("You are short.", "Bye now");
  ASSERT_EQ(a.cache().breakpoints_size(), 1);
  const int at = static_cast<int>(a.cache().breakpoints(0));
  EXPECT_EQ(b.cache().breakpoints(0), a.cache().breakpoints(0));
  const auto text = [&](const mesh::StartDecode& s, int begin, int end) {
    const std::vector<TokenId> ids(s.prompt().begin() + begin, s.prompt().begin() + end);
    return mesh->front->tokenizer().Decode(ids);
  };
  EXPECT_THAT(text(a, 0, at), HasSubstr("You are short."));
  EXPECT_EQ(text(a, 0, at), text(b, 0, at));
  EXPECT_THAT(text(a, at, a.prompt_size()), HasSubstr("Hello"));
  EXPECT_EQ(ask("", "Hello").cache().breakpoints_size(), 0);
}

TEST_F(OpenAiHttpTest, WholeChatReply) {
  Start();
  const auto r = Chat(
      R"("seed": 5, "temperature": 0.5, "max_completion_tokens": 50, "user": "u", "store": false)");
  ASSERT_EQ(r.status, 200) << r.body;
  const Json j = Json::parse(r.body);
  EXPECT_EQ(j["object"], "chat.completion");
  EXPECT_EQ(j["model"], "tiny");
  EXPECT_THAT(j["id"].get<std::string>(), ::testing::StartsWith("chatcmpl-"));
  EXPECT_EQ(j["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(j["choices"][0]["message"]["content"], "Hello world");
  EXPECT_EQ(j["choices"][0]["finish_reason"], "stop");
  const auto tokens = mesh->front->tokenizer().EncodeOrdinary("Hello world")->size() + 1;
  EXPECT_EQ(j["usage"]["completion_tokens"], tokens);
  EXPECT_EQ(j["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
  const auto started = mesh->started();
  ASSERT_EQ(started.size(), 1u);
  EXPECT_EQ(j["usage"]["prompt_tokens"], started[0].prompt_size());
  EXPECT_EQ(started[0].sampling().seed(), 5u);
  EXPECT_FLOAT_EQ(started[0].sampling().temperature(), 0.5f);
  EXPECT_EQ(started[0].max_tokens(), 50u);
  EXPECT_EQ(started[0].stop_token_ids(0), mesh->front->tokenizer().eos_ids()[0]);
}

TEST_F(OpenAiHttpTest, StreamedChatReply) {
  Start();
  const auto r = Chat(R"("stream": true, "stream_options": {"include_usage": true})");
  ASSERT_EQ(r.status, 200);
  EXPECT_THAT(r.head, HasSubstr("text/event-stream"));
  bool done = false;
  const std::vector<Json> events = Events(r.body, &done);
  EXPECT_TRUE(done);
  EXPECT_EQ(events.front()["choices"][0]["delta"]["role"], "assistant");
  std::string text;
  for (const Json& e : events) {
    EXPECT_EQ(e["object"], "chat.completion.chunk");
    EXPECT_TRUE(e.contains("usage"));
    for (const Json& c : e["choices"]) text += c["delta"].value("content", "");
  }
  EXPECT_EQ(text, "Hello world");
  EXPECT_EQ(events[events.size() - 2]["choices"][0]["finish_reason"], "stop");
  EXPECT_TRUE(events.back()["choices"].empty());
  EXPECT_GT(events.back()["usage"]["total_tokens"], 3);
}

TEST_F(OpenAiHttpTest, LengthStopStringAndStreamsAgree) {
  script = [this](const mesh::StartDecode&) { return mesh->Say("one two three four five"); };
  Start();
  Json j = Json::parse(Chat(R"("max_tokens": 2)").body);
  EXPECT_EQ(j["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(j["usage"]["completion_tokens"], 2);

  for (const std::string stop : {R"("ree f")", R"(["zzz", "ree f"])"}) {
    j = Json::parse(Chat("\"stop\": " + stop).body);
    EXPECT_EQ(j["choices"][0]["message"]["content"], "one two th") << stop;
    EXPECT_EQ(j["choices"][0]["finish_reason"], "stop");
  }
  std::string text;
  for (const Json& e : Events(Chat(R"("stop": "ree f", "stream": true)").body)) {
    for (const Json& c : e["choices"]) text += c["delta"].value("content", "");
  }
  EXPECT_EQ(text, "one two th");
}

TEST_F(OpenAiHttpTest, StopStringCancelsTheSequence) {
  script = [this](const mesh::StartDecode&) {
    Script s = mesh->Say("stop here and then much much more");
    s.end = false;  // only a cancel ends it
    return s;
  };
  Start();
  EXPECT_EQ(Json::parse(Chat(R"("stop": " and")").body)["choices"][0]["message"]["content"],
            "stop here");
  EXPECT_TRUE(FakeMesh::Await([&] { return mesh->Cancelled(mesh->started()[0].request_id()); }));
  EXPECT_TRUE(FakeMesh::Await([&] { return mesh->router->snapshot().gauges.live == 0; }));
}

TEST_F(OpenAiHttpTest, CompletionsTakeTextAndTokens) {
  Start();
  Json j = Json::parse(Post("/v1/completions", R"({"prompt": "Once", "max_tokens": 30})").body);
  EXPECT_EQ(j["object"], "text_completion");
  EXPECT_EQ(j["choices"][0]["text"], "Hello world");
  const std::vector<TokenId> once = *mesh->front->tokenizer().EncodeOrdinary("Once");
  EXPECT_EQ(mesh->started()[0].prompt_size(), static_cast<int>(once.size()));
  Post("/v1/completions", R"({"prompt": ["Once"], "max_tokens": 30})");
  EXPECT_EQ(mesh->started()[1].prompt_size(), static_cast<int>(once.size()));
  Post("/v1/completions", R"({"prompt": [5, 6, 7]})");
  EXPECT_EQ(mesh->started()[2].prompt(1), 6);
  EXPECT_EQ(mesh->started()[2].max_tokens(), 16u);
  Post("/v1/completions", R"({"prompt": [[8, 9]], "stream": true})");
  EXPECT_EQ(mesh->started()[3].prompt(0), 8);
}

TEST_F(OpenAiHttpTest, DeveloperIsSystem) {
  Start();
  for (const std::string role : {"system", "developer"}) {
    Post("/v1/chat/completions",
         R"({"messages":[{"role":")" + role +
             R"(","content":"Be brief."},{"role":"user","content":"Hi"}]})");
  }
  const auto started = mesh->started();
  ASSERT_EQ(started.size(), 2u);
  EXPECT_EQ(started[0].prompt_size(), started[1].prompt_size());
  EXPECT_TRUE(std::equal(started[0].prompt().begin(), started[0].prompt().end(),
                         started[1].prompt().begin()));
}

TEST_F(OpenAiHttpTest, LogprobsInBothShapes) {
  Start();
  const size_t tokens = mesh->front->tokenizer().EncodeOrdinary("Hello world")->size();
  Json j = Json::parse(Chat(R"("logprobs": true, "top_logprobs": 2)").body);
  const Json& content = j["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), tokens);  // the end token shows in no text and in no list
  EXPECT_EQ(content[0]["top_logprobs"].size(), 2u);
  std::string joined;
  for (const Json& c : content) {
    for (const Json& b : c["bytes"]) joined.push_back(static_cast<char>(b.get<int>()));
  }
  EXPECT_EQ(joined, "Hello world");
  EXPECT_TRUE(Json::parse(Chat().body)["choices"][0]["logprobs"].is_null());

  j = Json::parse(Post("/v1/completions", R"({"prompt": "x", "logprobs": 1})").body);
  const Json& legacy = j["choices"][0]["logprobs"];
  EXPECT_EQ(legacy["tokens"].size(), tokens);
  EXPECT_EQ(legacy["text_offset"][0], 0);
  EXPECT_EQ(legacy["top_logprobs"][0].size(), 1u);
  EXPECT_FLOAT_EQ(legacy["token_logprobs"][0].get<float>(), -0.5f);

  size_t streamed = 0;
  for (const Json& e : Events(Chat(R"("logprobs": true, "stream": true)").body)) {
    for (const Json& c : e["choices"]) {
      if (!c["logprobs"].is_null()) streamed += c["logprobs"]["content"].size();
    }
  }
  EXPECT_EQ(streamed, tokens);
}

TEST_F(OpenAiHttpTest, MessagesNameTheWholeRangeAndAllDigits) {
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
TEST_F(OpenAiHttpTest, WholeNumbersMayBeWrittenAsFloats) {
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

TEST_F(OpenAiHttpTest, BodiesThatDoNotSayTheyAreJsonAreRefused) {
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

TEST_F(OpenAiHttpTest, ClientThatEndsItsSideIsAnswered) {
  script = [this](const mesh::StartDecode&) {
    Script s = mesh->Say("one two three");
    s.gap = absl::Milliseconds(20);
    return s;
  };
  Start();
  for (const char* stream : {"false", "true"}) {
    RawHttp client(server->port());
    client.Send(RawHttp::Post(
        "/v1/chat/completions",
        R"({"messages":[{"role":"user","content":"a"}],"stream":)" + std::string(stream) + "}"));
    client.EndSending();
    const auto r = client.ReadResponse();
    EXPECT_EQ(r.status, 200);
    EXPECT_THAT(r.body, HasSubstr(stream[0] == 't' ? "[DONE]" : "one two three"));
  }
  EXPECT_EQ(mesh->cancelled_count(), 0u);
}

TEST_F(OpenAiHttpTest, RefusalsOfTheServerHaveTheShapeOfTheApi) {
  Start();
  const auto ask = [this](const std::string& path) {
    RawHttp client(server->port());
    client.Send("POST " + path + " HTTP/1.1\r\nHost: t\r\nContent-Length: 99999999999\r\n\r\n");
    return client.ReadResponse();
  };
  const auto r = ask("/v1/completions");
  EXPECT_EQ(r.status, 413);
  const Json e = Json::parse(r.body);
  EXPECT_EQ(e["error"]["type"], "invalid_request_error");
  EXPECT_THAT(e["error"]["message"].get<std::string>(), HasSubstr("body is larger than"));
  EXPECT_EQ(ask("/other").body.substr(0, 8), "the body");
  const HttpResponse full = api->Refusal(503, "full", "/v1/completions");
  EXPECT_EQ(Json::parse(full.body)["error"]["type"], "server_error");
}

TEST_F(OpenAiHttpTest, BadInputNamesTheFieldBeforeAnyWork) {
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
      {R"("audio": {})", 400, "audio"},
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
    EXPECT_EQ(r.status, 400) << r.body;
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

TEST_F(OpenAiHttpTest, BrokenBodiesAreRefused) {
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

TEST_F(OpenAiHttpTest, NoWorkerIsFiveHundredThreeAndFullIsFourTwentyNine) {
  script = [](const mesh::StartDecode&) {
    Script s;
    s.refuse = absl::ResourceExhaustedError("no slab");
    return s;
  };
  options.waiting_max = absl::Milliseconds(200);
  Start("kimi_linear_tiny", false);
  auto r = Chat();
  EXPECT_EQ(r.status, 503);
  EXPECT_THAT(r.head, HasSubstr("Retry-After: 1"));
  EXPECT_EQ(Json::parse(r.body)["error"]["type"], "server_error");
  mesh->Join();
  r = Chat(R"("stream": true)");  // fails before the first token: a status of its own
  EXPECT_EQ(r.status, 429) << r.body;
  EXPECT_THAT(r.head, HasSubstr("Retry-After: 1\r\n"));
}

// Requests of 400 tokens and an answer of one, at a worker that computes 100 a second.
TEST_F(OpenAiHttpTest, WhoFindsTheQueueFullHearsHowLongItTakes) {
  script = [](const mesh::StartDecode&) {
    Script s;
    s.end = false;  // whoever is placed stays
    return s;
  };
  options.waiting_requests_max = 2;
  Start("kimi_linear_tiny", false);
  mesh->slabs = 1;
  mesh->prompt_rate = 100;
  mesh->Join();
  std::string prompt = "1";
  for (int i = 1; i < 400; ++i) prompt += ",1";
  const std::string body = R"({"max_tokens": 1, "prompt": [)" + prompt + "]}";
  std::vector<std::unique_ptr<RawHttp>> held;
  for (int i = 0; i < 3; ++i) {
    held.push_back(std::make_unique<RawHttp>(server->port()));
    held.back()->Send(RawHttp::Post("/v1/completions", body));
    ASSERT_TRUE(FakeMesh::Await([&] {
      const auto gauges = mesh->router->snapshot().gauges;
      return gauges.live == i + 1 && gauges.waiting == i;
    }));
  }
  const auto r = Post("/v1/completions", body);
  EXPECT_EQ(r.status, 429) << r.body;
  EXPECT_THAT(r.head, HasSubstr("Retry-After: 13\r\n"));  // 3 * 401 tokens
  EXPECT_THAT(r.head, HasSubstr("Retry-After-Ms: 12030\r\n"));
  EXPECT_EQ(Json::parse(r.body)["error"]["type"], "rate_limit_error") << r.body;
}

TEST_F(OpenAiHttpTest, PartsThatDoNotFitAreNotTheClientsFault) {
  script = [](const mesh::StartDecode&) {
    Script s;
    s.refuse = absl::FailedPreconditionError("WRONG_MODEL");
    return s;
  };
  Start();
  EXPECT_EQ(Chat().status, 503);
}

// While every thread of the pool is busy the port answers all that is small.
TEST_F(OpenAiHttpTest, LargeInputsDoNotHoldUpTheRest) {
  Start();
  absl::Notification busy, release;
  ASSERT_TRUE(mesh->pool
                  .Post([&] {
                    busy.Notify();
                    release.WaitForNotification();
                  })
                  .ok());
  busy.WaitForNotification();
  const std::string large = R"({"prompt": "Hi", "pad": ")" + std::string(1 << 20, 'x') + "\"}";
  RawHttp first(server->port()), second(server->port());
  first.Send(RawHttp::Post("/v1/completions", large));
  second.Send(RawHttp::Post("/v1/completions", large));
  // Both queue places are taken when a third finds none.
  RawHttp::Response third;
  ASSERT_TRUE(FakeMesh::Await([&] { return mesh->pool.queued() == 2; }));
  third = Post("/v1/completions", large);
  EXPECT_EQ(third.status, 429) << third.body;
  EXPECT_THAT(third.body, HasSubstr("large inputs wait"));
  const absl::Time begin = absl::Now();
  for (const char* path : {"/healthz", "/readyz", "/metrics", "/v1/models"}) {
    RawHttp ops_client(server->port());
    ops_client.Send(RawHttp::Get(path));
    EXPECT_EQ(ops_client.ReadResponse().status, 200) << path;
  }
  EXPECT_LT(absl::Now() - begin, absl::Seconds(1));
  EXPECT_EQ(Chat().status, 200);
  release.Notify();
  EXPECT_EQ(first.ReadResponse().status, 200);
  EXPECT_EQ(second.ReadResponse().status, 200);
}

TEST_F(OpenAiHttpTest, InputsThatCannotBeServedAreRefusedBeforeTokenising) {
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

TEST_F(OpenAiHttpTest, AChatThatIsTooLongNamesItsMessages) {
  Start();
  std::string text;
  while (text.size() < 6000) text += "q!";
  const auto r = Post("/v1/chat/completions",
                      R"({"messages":[{"role":"user","content":")" + text + "\"}]}");
  EXPECT_EQ(r.status, 400);
  EXPECT_EQ(Json::parse(r.body)["error"]["param"], "messages") << r.body;
  EXPECT_THAT(r.body, HasSubstr("tokens leave no room for an answer in a context of 2048"));
}

TEST_F(OpenAiHttpTest, ErrorInTheMiddleOfAStreamIsItsLastEvent) {
  script = [this](const mesh::StartDecode&) {
    Script s = mesh->Say("some words");
    s.fail_after = absl::UnavailableError("expert shard lost");
    return s;
  };
  Start();
  const auto r = Chat(R"("stream": true)");
  EXPECT_EQ(r.status, 200);
  bool done = false;
  const std::vector<Json> events = Events(r.body, &done);
  EXPECT_FALSE(done);
  EXPECT_THAT(events.back()["error"]["message"].get<std::string>(), HasSubstr("expert shard lost"));
  EXPECT_EQ(Chat().status, 503);
}

TEST_F(OpenAiHttpTest, LeavingClientFreesTheSequenceAtOnce) {
  script = [this](const mesh::StartDecode&) {
    Script s = mesh->Say("first");
    s.end = false;
    return s;
  };
  Start();
  for (const std::string body : {R"({"messages":[{"role":"user","content":"a"}],"stream":true})",
                                 R"({"messages":[{"role":"user","content":"a"}]})"}) {
    const size_t before = mesh->cancelled_count();
    RawHttp client(server->port());
    client.Send(RawHttp::Post("/v1/chat/completions", body));
    ASSERT_TRUE(FakeMesh::Await([&] { return mesh->router->snapshot().gauges.live == 1; }));
    const absl::Time left = absl::Now();
    client.Close();
    EXPECT_TRUE(FakeMesh::Await([&] { return mesh->cancelled_count() > before; }));
    EXPECT_LT(absl::Now() - left, absl::Seconds(1));
    EXPECT_TRUE(FakeMesh::Await([&] { return mesh->router->snapshot().gauges.live == 0; }));
  }
}

TEST_F(OpenAiHttpTest, ModelsHealthAndMetrics) {
  Start();
  RawHttp client(server->port());
  const auto get = [&](const std::string& path) {
    client.Send(RawHttp::Get(path));
    return client.ReadResponse();
  };
  Json j = Json::parse(get("/v1/models").body);
  EXPECT_EQ(j["object"], "list");
  EXPECT_EQ(j["data"][0]["id"], "tiny");
  EXPECT_EQ(j["data"][0]["family"], "kimi_linear");
  EXPECT_EQ(j["data"][0]["context_length"], 2048);
  EXPECT_EQ(Json::parse(get("/v1/models/tiny").body)["id"], "tiny");
  EXPECT_EQ(get("/v1/models/other").status, 404);
  EXPECT_EQ(get("/readyz").status, 200);
  Chat();
  Chat(R"("n": 1)");
  ASSERT_TRUE(FakeMesh::Await([&] { return mesh->router->snapshot().gauges.live == 0; }));
  const std::string metrics = get("/metrics").body;
  EXPECT_THAT(metrics, HasSubstr("deltamesh_requests_total{role=\"router\",code=\"OK\"} 2"));
  EXPECT_THAT(metrics, HasSubstr("deltamesh_ttft_seconds_count{role=\"router\"} 2"));
  EXPECT_THAT(metrics, HasSubstr("deltamesh_workers{role=\"router\",worker_role=\"decode\"} 1"));
}

TEST_F(OpenAiHttpTest, ThinkingAndToolCallsAreTakenApart) {
  script = [this](const mesh::StartDecode&) {
    const auto special = [this](const char* name) {
      return *mesh->front->tokenizer().SpecialId(name);
    };
    const TokenId open = special("<|open|>"), close = special("<|close|>"),
                  sep = special("<|sep|>");
    Script s;
    const auto text = [&](const std::string& t) {
      const std::vector<TokenId> ids = mesh->Say(t).tokens;
      s.tokens.insert(s.tokens.end(), ids.begin(), ids.end());
    };
    const auto mark = [&](TokenId kind, const std::string& tag) {
      s.tokens.push_back(kind);
      text(tag);
      s.tokens.push_back(sep);
    };
    text("hmm");
    mark(close, "think");
    mark(open, "response");
    text("Let me look.");
    mark(close, "response");
    return s;
  };
  Start("kimi_k3_tiny");
  Json j = Json::parse(Chat().body);
  EXPECT_EQ(j["choices"][0]["message"]["reasoning_content"], "hmm");
  EXPECT_EQ(j["choices"][0]["message"]["content"], "Let me look.");
  std::string reasoning;
  for (const Json& e : Events(Chat(R"("stream": true)").body)) {
    for (const Json& c : e["choices"]) reasoning += c["delta"].value("reasoning_content", "");
  }
  EXPECT_EQ(reasoning, "hmm");
  const auto before = mesh->started().size();
  Chat(R"("thinking": {"type": "disabled"})");
  Chat(R"("chat_template_kwargs": {"thinking": false})");
  EXPECT_LT(mesh->started()[before].prompt_size(), mesh->started()[0].prompt_size());
  EXPECT_EQ(mesh->started()[before + 1].prompt_size(), mesh->started()[before].prompt_size());
}

}  // namespace
}  // namespace deltamesh

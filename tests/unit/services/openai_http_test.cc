// What the OpenAI endpoints answer.
#include "tests/unit/services/busy_thread.h"
#include "tests/unit/services/openai_fixture.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

TEST_F(OpenAiHttpTest, CacheHintsReachTheWorkers) {
  Start();
  Chat(R"("prompt_cache_key": "one")");
  Chat(R"("prompt_cache_key": "two")");
  Chat(R"("prompt_cache_key": "one", "cache_salt": "s")");
  Chat();
  const auto started = mesh->started();
  ASSERT_EQ(started.size(), 4u);
  const uint64_t one = started[0].cache().session();
  EXPECT_NE(one, 0u);
  EXPECT_NE(started[1].cache().session(), one);
  EXPECT_NE(started[2].cache().session(), one) << "another tenant's";
  EXPECT_EQ(started[2].cache().salt(), "s");
  EXPECT_EQ(started[3].cache().session(), 0u);
  // Names over HTTP tell requests that belong together. They are no sessions, and no session's.
  EXPECT_EQ(mesh->router->snapshot().gauges.sessions, 0);
  EXPECT_NE(one, SessionNumber(MakeSessionId("", "one")));
  EXPECT_THAT(Chat(R"("cache_salt": 5)").body, HasSubstr("cache_salt"));
  EXPECT_THAT(Chat("\"prompt_cache_key\": \"" + std::string(257, 'x') + "\"").body,
              HasSubstr("prompt_cache_key: 257 bytes"));
}

// By the headers that agents send; the body's own key goes first, and what cannot be a name is none.
TEST_F(OpenAiHttpTest, AgentsHeadersNameWhatBelongsTogether) {
  Start();
  Chat(R"("prompt_cache_key": "one")");
  Chat(R"("prompt_cache_key": "two")");
  const uint64_t one = mesh->started()[0].cache().session();
  const uint64_t two = mesh->started()[1].cache().session();
  ASSERT_NE(one, two);
  const auto named = [&](const std::string& header, const std::string& more = "") {
    RawHttp client(server->port());
    std::string request = RawHttp::Post(
        "/v1/chat/completions", R"({"messages":[{"role":"user","content":"Hi"}])" + more + "}");
    request.insert(request.find("\r\n") + 2, header + "\r\n");
    client.Send(request);
    EXPECT_EQ(client.ReadResponse().status, 200) << header;
    return mesh->started().back().cache().session();
  };
  for (const char* header :
       {"X-Claude-Code-Session-Id", "session-id", "Session_Id", "X-Session-Affinity"}) {
    EXPECT_EQ(named(std::string(header) + ": one"), one) << header;
    EXPECT_EQ(named(std::string(header) + ": one", R"(, "prompt_cache_key": "two")"), two)
        << header;
    EXPECT_EQ(named(std::string(header) + ": " + std::string(257, 'x')), 0u) << header;
  }
  EXPECT_EQ(named("X-Session-Affinity: two\r\nsession-id: one"), one) << "the order is fixed";
  EXPECT_EQ(named("X-Some-Session: one"), 0u);
}

// A turn names a session and brings only what is new; workers are sent what the whole conversation would be.
TEST_F(OpenAiHttpTest, TurnsAreAppendedToSessions) {
  Start();
  const auto ids = [&](size_t turn) {
    const auto prompt = mesh->started()[turn].prompt();
    return std::vector<int>(prompt.begin(), prompt.end());
  };
  const RawHttp::Response first = Chat(R"("session": "s", "cache_salt": "mine")");
  EXPECT_EQ(first.status, 200) << first.body;
  const Json one = Json::parse(first.body);
  EXPECT_EQ(one["session_tokens"], one["usage"]["total_tokens"]);
  EXPECT_EQ(mesh->started()[0].cache().session(), SessionNumber(MakeSessionId("mine", "s")));
  EXPECT_TRUE(FakeMesh::Await([&] { return mesh->router->snapshot().gauges.sessions == 1; }));

  const std::string append =
      R"("session": "s", "cache_salt": "mine", "append_to_session": true, "stream": true, )"
      R"("session_tokens": )" +
      one["session_tokens"].dump();
  const std::vector<Json> events = Events(Chat(append).body);
  ASSERT_FALSE(events.empty());
  const int64_t after = events.back()["session_tokens"];
  EXPECT_EQ(events.back()["choices"][0]["finish_reason"], "stop");
  const std::vector<int> before = ids(0), prompt = ids(1);
  ASSERT_GT(prompt.size(), one["session_tokens"].get<size_t>());
  EXPECT_TRUE(std::equal(before.begin(), before.end(), prompt.begin()));
  EXPECT_GT(after, static_cast<int64_t>(prompt.size()));
  EXPECT_LT(prompt.size(), one["session_tokens"].get<size_t>() + before.size() + 8);
  // It has moved on.
  const RawHttp::Response stale = Chat(append);
  EXPECT_EQ(stale.status, 400);
  EXPECT_THAT(stale.body, HasSubstr("session_tokens: "));
  EXPECT_THAT(stale.body, HasSubstr(absl::StrFormat("append with %d", after)));
  EXPECT_THAT(stale.body, ::testing::Not(HasSubstr("GetSession"))) << "which HTTP has not";
  // Tokens follow as they are.
  EXPECT_EQ(
      Post("/v1/completions",
           R"({"prompt": [7], "session": "s", "cache_salt": "mine", "append_to_session": true})")
          .status,
      200);
  EXPECT_EQ(ids(2).back(), 7);
  EXPECT_EQ(static_cast<int64_t>(ids(2).size()), after + 1);
}

TEST_F(OpenAiHttpTest, AppendingIsRefusedClearly) {
  Start();
  const auto expect = [&](const std::string& more, int status, const char* words) {
    const RawHttp::Response response = Chat(more);
    EXPECT_EQ(response.status, status) << response.body;
    EXPECT_THAT(response.body, HasSubstr(words));
  };
  expect(R"("session": "s", "append_to_session": true)", 404, "is not known under this salt");
  EXPECT_EQ(Chat(R"("session": "s")").status, 200);
  expect(R"("session": "s", "cache_salt": "another", "append_to_session": true)", 404,
         "is not known under this salt");
  expect(R"("append_to_session": true)", 400, "append_to_session: without session");
  // A key is no session's name, also when it is spelled like one.
  expect(R"("prompt_cache_key": "s", "append_to_session": true)", 400, "without session");
  expect(R"("session": "")", 400, "session: 0 bytes; use 1 to 256");
  expect("\"session\": \"" + std::string(257, 'x') + "\"", 400, "session: 257 bytes");
  expect(R"("session": 5)", 400, "session: is the number 5");
  expect(R"("session": "s", "append_to_session": 1)", 400, "append_to_session: is the number 1");
  expect(R"("session": "s", "session_tokens": 3)", 400, "without append_to_session");
  expect(R"("session": "s", "append_to_session": true, "session_tokens": 0)", 400,
         "session_tokens: 0 is out of range");
  expect(R"("session": "s", "append_to_session": true, "tools":
            [{"type": "function", "function": {"name": "f"}}])",
         400, "tools: a conversation declares");
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

// The text up to each breakpoint of a request, the shallowest first.
std::vector<std::string> TextsUpTo(FakeMesh& mesh, const mesh::StartDecode& start) {
  std::vector<std::string> texts;
  for (const uint64_t tokens : start.cache().breakpoints()) {
    const std::vector<TokenId> ids(start.prompt().begin(),
                                   start.prompt().begin() + static_cast<int>(tokens));
    texts.push_back(mesh.front->tokenizer().Decode(ids));
  }
  return texts;
}

TEST_F(OpenAiHttpTest, ClientsMarkWhatOtherPromptsBeginWith) {
  using ::testing::EndsWith;
  using ::testing::Not;
  for (const char* model : {"kimi_linear_tiny", "kimi_k3_tiny"}) {
    Start(model);
    // After a part of a message, and after a whole one.
    auto r = Post("/v1/chat/completions", R"({"messages":[{"role":"user","content":[
        {"type":"text","text":"A long document. ","cache_control":{"type":"ephemeral"}},
        {"type":"text","text":"What of it?"}]}]})");
    ASSERT_EQ(r.status, 200) << r.body;
    std::vector<std::string> texts = TextsUpTo(*mesh, mesh->started().back());
    ASSERT_EQ(texts.size(), 1u);
    EXPECT_THAT(texts[0], HasSubstr("A long document."));
    EXPECT_THAT(texts[0], Not(HasSubstr("What")));
    r = Post("/v1/chat/completions", R"({"messages":[{"role":"system","content":"Be short."},
        {"role":"user","content":"Hello","cache_control":{"type":"ephemeral"}},
        {"role":"assistant","content":"Hi"},{"role":"user","content":"Bye"}]})");
    ASSERT_EQ(r.status, 200) << r.body;
    texts = TextsUpTo(*mesh, mesh->started().back());
    ASSERT_EQ(texts.size(), 2u) << "and the end of the system text";
    EXPECT_THAT(texts[0], Not(HasSubstr("Hello")));
    EXPECT_THAT(texts[1], HasSubstr("Hello"));
    EXPECT_THAT(texts[1], Not(HasSubstr("Hi\n")));
    EXPECT_THAT(texts[1], Not(HasSubstr("Bye")));
    // What a new prompt leaves behind is bounded: the two shallowest.
    r = Post("/v1/chat/completions", R"({"messages":[
        {"role":"user","content":"one","cache_control":{"type":"ephemeral"}},
        {"role":"assistant","content":"two","cache_control":{"type":"ephemeral"}},
        {"role":"user","content":"three","cache_control":{"type":"ephemeral"}},
        {"role":"user","content":"four"}]})");
    ASSERT_EQ(r.status, 200) << r.body;
    EXPECT_EQ(mesh->started().back().cache().breakpoints_size(), 2);
    r = Post("/v1/completions", R"({"prompt":[65,66,67,68,69],"cache_breakpoints":[4,2]})");
    ASSERT_EQ(r.status, 200) << r.body;
    const auto last = mesh->started().back();
    const auto& at = last.cache().breakpoints();
    EXPECT_THAT(std::vector<uint64_t>(at.begin(), at.end()), ::testing::ElementsAre(2, 4));
    TearDown();
  }
}

TEST_F(OpenAiHttpTest, MarksThatAreWrongOrTooMany) {
  Start();
  const auto refused = [&](const std::string& path, const std::string& body,
                           const std::string& message) {
    const auto r = Post(path, body);
    EXPECT_EQ(r.status, 400) << body << " " << r.body;
    EXPECT_THAT(r.body, HasSubstr(message)) << body;
  };
  const std::string chat = "/v1/chat/completions";
  refused(chat, R"({"messages":[{"role":"user","content":"x","cache_control":true}]})",
          "messages[0].cache_control: is a boolean");
  refused(chat,
          R"({"messages":[{"role":"user","content":"x","cache_control":{"type":"eternal"}}]})",
          "messages[0].cache_control.type");
  refused(chat, R"({"messages":[{"role":"user","content":[
      {"type":"text","text":"x","cache_control":{"type":1}}]}]})",
          "messages[0].content[0].cache_control.type: is the number 1");
  std::string many;
  for (int i = 0; i < 17; ++i) {
    many += std::string(i > 0 ? "," : "") +
            R"({"role":"user","content":"x","cache_control":{"type":"ephemeral"}})";
  }
  refused(chat, R"({"messages":[)" + many + "]}", "mark at most 16");
  const std::string marked =
      R"({"messages":[{"role":"user","content":"x","cache_control":{"type":"ephemeral"}}],)";
  refused(chat, marked + R"("cache_breakpoints":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]})",
          "17 places are marked");
  refused(chat, marked + R"("cache_breakpoints":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]})",
          "cache.breakpoints: 17 positions; use at most 16");
  refused("/v1/completions",
          R"({"prompt":"x","cache_breakpoints":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]})",
          "cache.breakpoints: 17 positions; use at most 16");
  refused(chat, marked + R"("cache_breakpoints":4})", "cache_breakpoints: is the number 4");
  refused(chat, marked + R"("cache_breakpoints":[0]})", "cache_breakpoints[0]: 0");
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
  EXPECT_THAT(api->Refusal(503, "full", "/v1/completions").body, HasSubstr("server_error"));
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

// A client that left while its request waited for a thread is not worked for.
TEST_F(OpenAiHttpTest, NobodyComputesForAClientThatLeftTheQueue) {
  Start();
  BusyThread busy(&mesh->pool);
  RawHttp client(server->port());
  client.Send(RawHttp::Post("/v1/completions",
                            R"({"prompt": "Hi", "pad": ")" + std::string(1 << 20, 'x') + "\"}"));
  ASSERT_TRUE(FakeMesh::Await([&] { return mesh->pool.queued() == 1; }));
  client.Reset();
  absl::SleepFor(absl::Milliseconds(300));  // until the server has heard of it
  busy.Release();
  ASSERT_TRUE(FakeMesh::Await([&] { return mesh->pool.queued() == 0; }));
  EXPECT_EQ(Chat().status, 200);
  EXPECT_EQ(mesh->started().size(), 1u);
}

// While every thread of the pool is busy the port answers all that is small.
TEST_F(OpenAiHttpTest, LargeInputsDoNotHoldUpTheRest) {
  Start();
  BusyThread busy(&mesh->pool);
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
  busy.Release();
  EXPECT_EQ(first.ReadResponse().status, 200);
  EXPECT_EQ(second.ReadResponse().status, 200);
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

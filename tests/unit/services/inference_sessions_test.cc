// Sessions over a real gRPC connection, in front of a scripted decode worker with a store for records.
#include <grpcpp/grpcpp.h>

#include "absl/synchronization/notification.h"
#include "deltamesh/v1/inference.grpc.pb.h"
#include "services/common/grpc_server.h"
#include "services/router/grpc_translation.h"
#include "services/router/inference_service.h"
#include "tests/unit/services/fake_mesh.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

class InferenceSessionsTest : public ::testing::TestWithParam<const char*> {
 protected:
  void Start(bool store = true) {
    if (script) mesh.script = script;
    mesh.with_store = store;
    mesh.Join();
    service = std::make_unique<InferenceService>(mesh.front.get(), mesh.router.get(), &mesh.pool);
    auto started = GrpcServer::Start({}, {service.get()});
    ASSERT_TRUE(started.ok()) << started.status();
    server = *std::move(started);
    stub = v1::Inference::NewStub(
        grpc::CreateChannel(server->address(), grpc::InsecureChannelCredentials()));
  }

  static v1::GenerateRequest Say(const std::string& text, bool append,
                                 const std::string& salt = "") {
    v1::GenerateRequest r;
    auto* m = r.mutable_chat()->add_messages();
    m->set_role("user");
    m->set_content(text);
    r.mutable_cache()->set_session("s");
    r.mutable_cache()->set_salt(salt);
    r.set_append_to_session(append);
    return r;
  }
  grpc::Status Run(const v1::GenerateRequest& request, v1::Finish* finish = nullptr) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(20)));
    auto reader = stub->Generate(&context, request);
    for (v1::GenerateEvent event; reader->Read(&event);) {
      if (event.has_finish() && finish != nullptr) *finish = event.finish();
    }
    return reader->Finish();
  }
  // Calls `method` with a session "s" and what `fill` adds.
  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (v1::Inference::Stub::*method)(grpc::ClientContext*,
                                                                const Request&, Response*),
                    Response* response, const std::function<void(Request*)>& fill = {},
                    absl::Duration deadline = absl::Seconds(20)) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
    Request request;
    request.set_session("s");
    if (fill) fill(&request);
    return (stub.get()->*method)(&context, request, response);
  }
  grpc::Status Get(v1::SessionInfo* info, const std::string& salt = "") {
    return Call<v1::GetSessionRequest>(&v1::Inference::Stub::GetSession, info, [&](auto* r) {
      r->set_salt(salt);
      r->set_with_token_ids(true);
    });
  }
  grpc::Status Suspend(v1::SuspendSessionResponse* response) {
    return Call<v1::SuspendSessionRequest>(&v1::Inference::Stub::SuspendSession, response);
  }

  FakeMesh mesh{GetParam()};
  std::function<Script(const mesh::StartDecode&)> script;
  std::unique_ptr<InferenceService> service;
  std::unique_ptr<GrpcServer> server;
  std::unique_ptr<v1::Inference::Stub> stub;
};

INSTANTIATE_TEST_SUITE_P(Families, InferenceSessionsTest,
                         ::testing::Values("kimi_k3_tiny", "kimi_linear_tiny"));

// What workers are sent for an appended turn is what they would be sent for the whole conversation.
TEST_P(InferenceSessionsTest, AppendedTurnsAreTheWholeConversation) {
  const bool k3 = std::string(GetParam()) == "kimi_k3_tiny";
  script = [&](const mesh::StartDecode&) {
    Script s;
    // As the family writes it, up to the end token.
    std::vector<Segment> said = {{"Hello", false}};
    if (k3) {
      said = {{"hm", false},       {"<|close|>", true}, {"think", false},  {"<|sep|>", true},
              {"<|open|>", true},  {"response", false}, {"<|sep|>", true}, {"Hello", false},
              {"<|close|>", true}, {"response", false}, {"<|sep|>", true}, {"<|close|>", true},
              {"message", false},  {"<|sep|>", true}};
    }
    s.tokens = mesh.front->tokenizer().EncodeSegments(said).value();
    return s;
  };
  Start();
  v1::Finish finish;
  ASSERT_TRUE(Run(Say("One", false), &finish).ok());
  v1::SessionInfo info;
  ASSERT_TRUE(Get(&info).ok());
  EXPECT_EQ(info.tokens(), finish.session_tokens());
  EXPECT_TRUE(info.ended());
  v1::GenerateRequest second = Say("Two", true);
  second.set_session_tokens(info.tokens());
  ASSERT_TRUE(Run(second, &finish).ok());
  v1::GenerateRequest whole = Say("One", false);
  auto* answer = whole.mutable_chat()->add_messages();
  answer->set_role("assistant");
  answer->set_content("Hello");
  if (k3) answer->set_reasoning_content("hm");
  *whole.mutable_chat()->add_messages() = second.chat().messages(0);
  ASSERT_TRUE(Run(whole).ok());
  const auto started = mesh.started();
  ASSERT_EQ(started.size(), 3u);
  EXPECT_TRUE(std::equal(started[1].prompt().begin(), started[1].prompt().end(),
                         started[2].prompt().begin(), started[2].prompt().end()));
  EXPECT_GT(finish.session_tokens(), info.tokens());
  // The guard: it has moved on.
  const grpc::Status stale = Run(second);
  EXPECT_EQ(stale.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(stale.error_message(), HasSubstr("session_tokens: "));
}

TEST_P(InferenceSessionsTest, TextAndTokensFollowAsTheyAre) {
  Start();
  v1::GenerateRequest first;
  first.set_text("Once");
  first.mutable_cache()->set_session("s");
  ASSERT_TRUE(Run(first).ok());
  v1::SessionInfo info;
  ASSERT_TRUE(Get(&info).ok());
  v1::GenerateRequest more = first;
  more.mutable_tokens()->add_ids(7);
  more.set_append_to_session(true);
  ASSERT_TRUE(Run(more).ok());
  std::vector<int> want(info.token_ids().begin(), info.token_ids().end());
  want.push_back(7);
  const auto prompt = mesh.started()[1].prompt();
  EXPECT_EQ(std::vector<int>(prompt.begin(), prompt.end()), want);
}

// Also when the token that completes the string is the answer's last one for another reason.
TEST_P(InferenceSessionsTest, AStopStringCutsTheSessionWhereItCutsTheAnswer) {
  script = [this](const mesh::StartDecode&) { return mesh.Say("one two three four"); };
  Start();
  for (const uint32_t most : {0u, 1u}) {
    v1::GenerateRequest r;
    r.set_text("Count");
    r.mutable_cache()->set_session("s");
    r.mutable_stop()->add_strings(most == 0 ? "three" : "o");
    r.mutable_stop()->set_max_tokens(most);
    v1::Finish finish;
    ASSERT_TRUE(Run(r, &finish).ok());
    EXPECT_FALSE(finish.stop_string().empty());
    v1::SessionInfo info;
    ASSERT_TRUE(Get(&info).ok());
    EXPECT_EQ(info.tokens(), finish.session_tokens());
    EXPECT_EQ(info.tokens(), finish.usage().prompt_tokens() + finish.usage().completion_tokens());
  }
}

TEST_P(InferenceSessionsTest, ASuspendedSessionGoesOnByItself) {
  Start();
  ASSERT_TRUE(Run(Say("One", false)).ok());
  v1::SessionInfo info;
  ASSERT_TRUE(Get(&info).ok());
  v1::SuspendSessionResponse suspended;
  ASSERT_TRUE(Suspend(&suspended).ok());
  EXPECT_EQ(suspended.tokens(), info.tokens());
  EXPECT_EQ(suspended.tier(), "disk");
  EXPECT_EQ(suspended.worker(), "d1");
  EXPECT_GT(suspended.bytes(), 0u);
  v1::SessionInfo rested;
  ASSERT_TRUE(Get(&rested).ok());
  EXPECT_TRUE(rested.suspended());
  EXPECT_EQ(rested.tokens(), info.tokens());
  ASSERT_TRUE(Suspend(&suspended).ok()) << "again";
  v1::ForkSessionResponse forked;
  ASSERT_TRUE(Call<v1::ForkSessionRequest>(&v1::Inference::Stub::ForkSession, &forked, [](auto* r) {
                r->set_new_session("f");
              }).ok());
  EXPECT_EQ(forked.tokens(), info.tokens());
  ASSERT_TRUE(Run(Say("Two", true)).ok());
  const auto prompt = mesh.started()[1].prompt();
  EXPECT_TRUE(std::equal(info.token_ids().begin(), info.token_ids().end(), prompt.begin()));
  ASSERT_TRUE(Get(&info).ok());
  EXPECT_FALSE(info.suspended());
  v1::ResumeSessionResponse resumed;
  ASSERT_TRUE(Call<v1::ResumeSessionRequest>(&v1::Inference::Stub::ResumeSession, &resumed).ok());
  EXPECT_EQ(resumed.tokens(), info.tokens());
}

TEST_P(InferenceSessionsTest, ErrorsNameWhatIsWrong) {
  Start(/*store=*/false);
  const auto expect = [](const grpc::Status& status, grpc::StatusCode code, const char* words) {
    EXPECT_EQ(status.error_code(), code) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(words));
  };
  expect(Run(Say("One", true)), grpc::StatusCode::NOT_FOUND, "session: \"s\" is not known");
  v1::GenerateRequest r = Say("One", true);
  r.mutable_cache()->clear_session();
  expect(Run(r), grpc::StatusCode::INVALID_ARGUMENT, "append_to_session: without cache.session");
  r = Say("One", true);
  r.mutable_cache()->set_off(true);
  expect(Run(r), grpc::StatusCode::INVALID_ARGUMENT, "append_to_session: with cache.off");
  r = Say("One", false);
  r.set_session_tokens(4);
  expect(Run(r), grpc::StatusCode::INVALID_ARGUMENT, "session_tokens: 4 without");
  r = Say("One", true);
  r.mutable_chat()->set_tools_json(R"([{"type": "function", "function": {"name": "f"}}])");
  expect(Run(r), grpc::StatusCode::INVALID_ARGUMENT, "tools: a conversation declares");
  ASSERT_TRUE(Run(Say("One", false, "mine")).ok());
  v1::SessionInfo info;
  expect(Get(&info), grpc::StatusCode::NOT_FOUND, "is not known under this salt");
  EXPECT_TRUE(Get(&info, "mine").ok());
  v1::SuspendSessionResponse suspended;
  expect(Call<v1::SuspendSessionRequest>(&v1::Inference::Stub::SuspendSession, &suspended,
                                         [](auto* q) { q->set_salt("mine"); }),
         grpc::StatusCode::FAILED_PRECONDITION, "--store-dir");
  expect(Call<v1::GetSessionRequest>(&v1::Inference::Stub::GetSession, &info,
                                     [](auto* q) { q->set_session(std::string(257, 'x')); }),
         grpc::StatusCode::INVALID_ARGUMENT, "session: 257 bytes");
  expect(Call<v1::GetSessionRequest>(&v1::Inference::Stub::GetSession, &info,
                                     [](auto* q) { q->clear_session(); }),
         grpc::StatusCode::INVALID_ARGUMENT, "session: is empty");
  v1::ForkSessionResponse forked;
  expect(Call<v1::ForkSessionRequest>(&v1::Inference::Stub::ForkSession, &forked),
         grpc::StatusCode::INVALID_ARGUMENT, "new_session: is empty");
}

// A session that is too large, or a store full of records, is so a second later too.
TEST(InferenceBoundsTest, WhereComingAgainDoesNotHelpNobodyIsToldTo) {
  const absl::Status full = absl::ResourceExhaustedError("session: 9 tokens are more than fit");
  EXPECT_TRUE(RetryHint(full).empty());
  const GrpcCall::Metadata hint = RetryHint(WithRetryAfter(full, absl::Milliseconds(1500)));
  EXPECT_EQ(hint, (GrpcCall::Metadata{{"retry-after-ms", "1500"}, {"retry-after", "2"}}));
}

TEST(InferenceBoundsTest, WhereRoomComesByItselfClientsAreToldWhenToComeAgain) {
  RouterOptions options;
  options.session_calls_max = 1;
  FakeMesh mesh("kimi_linear_tiny", options);
  mesh.with_store = true;
  mesh.deaf_store = true;
  mesh.Join();
  InferenceService service(mesh.front.get(), mesh.router.get(), &mesh.pool);
  auto server = GrpcServer::Start({}, {&service}).value();
  const auto stub = v1::Inference::NewStub(
      grpc::CreateChannel(server->address(), grpc::InsecureChannelCredentials()));
  const auto refused = [](const grpc::ClientContext& context, const grpc::Status& status) {
    EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
    const auto& metadata = context.GetServerTrailingMetadata();
    EXPECT_EQ(metadata.count("retry-after"), 1u) << status.error_message();
    EXPECT_EQ(metadata.count("retry-after-ms"), 1u) << status.error_message();
  };
  v1::GetSessionRequest get;
  get.set_session("s");
  std::thread first([&] {  // has the one place there is
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(2)));
    v1::SessionInfo info;
    EXPECT_FALSE(stub->GetSession(&context, get, &info).ok());
  });
  EXPECT_TRUE(FakeMesh::Await([&] { return mesh.router->snapshot().gauges.session_calls == 1; }));
  {
    grpc::ClientContext context;
    v1::SessionInfo info;
    const grpc::Status status = stub->GetSession(&context, get, &info);
    refused(context, status);
  }
  absl::Notification release;
  EXPECT_TRUE(mesh.pool.Post([&] { release.WaitForNotification(); }).ok());
  while (mesh.pool.PostAside([] {}).ok()) {  // until what waits aside is as much as may
  }
  {
    grpc::ClientContext context;
    v1::TokenizeRequest large;
    large.set_text(std::string(1 << 16, 'x'));
    v1::TokenizeResponse ids;
    const grpc::Status status = stub->Tokenize(&context, large, &ids);
    refused(context, status);
  }
  release.Notify();
  first.join();
}

TEST_P(InferenceSessionsTest, CallsThatWaitEndWithTheirDeadlineOrTheRouter) {
  Start();
  mesh.deaf_store = true;
  v1::SessionInfo info;
  EXPECT_EQ(Call<v1::GetSessionRequest>(&v1::Inference::Stub::GetSession, &info, {},
                                        absl::Milliseconds(100))
                .error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(FakeMesh::Await([&] { return mesh.router->snapshot().gauges.session_calls == 0; }));
  grpc::Status turn, get;
  std::thread waiting([&] { turn = Run(Say("One", true)); });
  std::thread asking([&] { get = Get(&info); });
  EXPECT_TRUE(FakeMesh::Await([&] { return mesh.router->snapshot().gauges.session_calls == 2; }));
  mesh.router->Stop();
  waiting.join();
  asking.join();
  EXPECT_EQ(turn.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(get.error_code(), grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace deltamesh

// deltamesh.v1.Inference over a real gRPC connection, in front of a scripted decode worker.
#include "services/router/inference_service.h"

#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include <sstream>

#include "absl/synchronization/notification.h"
#include "deltamesh/v1/inference.grpc.pb.h"
#include "services/cli/explain.h"
#include "services/common/grpc_server.h"
#include "services/router/operations_service.h"
#include "tests/unit/services/fake_mesh.h"

namespace deltamesh {
namespace {

using ::testing::HasSubstr;

struct Answer {
  std::string text, reasoning;
  std::vector<int> tokens;
  size_t infos = 0;
  v1::Finish finish;
  grpc::Status status;
};

class InferenceServiceTest : public ::testing::Test {
 protected:
  void Start(bool join = true) {
    if (script) mesh.script = script;
    if (join) mesh.Join();
    service = std::make_unique<InferenceService>(mesh.front.get(), mesh.router.get(), &mesh.pool);
    auto started = GrpcServer::Start({}, {service.get()});
    ASSERT_TRUE(started.ok()) << started.status();
    server = *std::move(started);
    stub = v1::Inference::NewStub(
        grpc::CreateChannel(server->address(), grpc::InsecureChannelCredentials()));
  }

  static v1::GenerateRequest Hello() {
    v1::GenerateRequest r;
    auto* m = r.mutable_chat()->add_messages();
    m->set_role("user");
    m->set_content("Hi");
    return r;
  }

  Answer Run(const v1::GenerateRequest& request, absl::Duration deadline = absl::Seconds(20)) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
    auto reader = stub->Generate(&context, request);
    Answer a;
    for (v1::GenerateEvent event; reader->Read(&event);) {
      EXPECT_FALSE(a.finish.has_usage()) << "an event after the finish";
      if (event.has_finish()) a.finish = event.finish();
      a.text += event.delta().text();
      a.reasoning += event.delta().reasoning();
      for (const int t : event.delta().tokens()) a.tokens.push_back(t);
      a.infos += static_cast<size_t>(event.delta().infos_size());
    }
    a.status = reader->Finish();
    return a;
  }

  FakeMesh mesh;
  std::function<Script(const mesh::StartDecode&)> script;
  std::unique_ptr<InferenceService> service;
  std::unique_ptr<GrpcServer> server;
  std::unique_ptr<v1::Inference::Stub> stub;
};

TEST_F(InferenceServiceTest, StreamsAnAnswer) {
  Start();
  v1::GenerateRequest r = Hello();
  r.set_logprobs(2);
  r.mutable_sampling()->set_seed(42);
  const Answer a = Run(r);
  ASSERT_TRUE(a.status.ok()) << a.status.error_message();
  EXPECT_EQ(a.text, "Hello world");
  EXPECT_EQ(a.finish.reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(a.finish.seed(), 42u);
  EXPECT_EQ(a.finish.usage().completion_tokens(), a.tokens.size());
  EXPECT_EQ(a.infos, a.tokens.size());
  EXPECT_EQ(a.tokens.back(), mesh.front->tokenizer().eos_ids()[0]);
}

TEST_F(InferenceServiceTest, TextTokensStopAndDrawnSeeds) {
  script = [this](const mesh::StartDecode&) { return mesh.Say("one two three four"); };
  Start();
  v1::GenerateRequest r;
  r.set_text("Once upon");
  r.mutable_stop()->add_strings("three");
  const Answer a = Run(r);
  EXPECT_EQ(a.text, "one two ");
  EXPECT_EQ(a.finish.stop_string(), "three");
  EXPECT_EQ(a.finish.reason(), v1::FINISH_REASON_STOP);
  v1::GenerateRequest t;
  t.mutable_tokens()->add_ids(9);
  t.mutable_stop()->set_max_tokens(1);
  t.mutable_stop()->set_ignore_eos(true);
  t.mutable_stop()->add_token_ids(77);
  const Answer b = Run(t);
  EXPECT_EQ(b.finish.reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(mesh.started()[1].stop_token_ids_size(), 1);
  EXPECT_NE(a.finish.seed(), b.finish.seed());
}

TEST_F(InferenceServiceTest, BadInputIsNamedBeforeAnyWork) {
  Start();
  const std::vector<std::pair<std::function<void(v1::GenerateRequest*)>, std::string>> cases = {
      {[](auto* r) { r->clear_input(); }, "input: is missing"},
      {[](auto* r) { r->mutable_sampling()->set_temperature(-1); }, "temperature: -1"},
      {[](auto* r) { r->mutable_sampling()->set_top_p(std::nanf("")); }, "top_p: nan"},
      {[](auto* r) { r->mutable_sampling()->set_top_k(1u << 31); }, "top_k: 2147483648"},
      {[](auto* r) { (*r->mutable_sampling()->mutable_logit_bias())[-1] = 1; },
       "logit_bias: token -1"},
      {[](auto* r) { r->set_request_id("a b"); }, "request_id:"},
      {[](auto* r) { r->set_request_id(std::string(129, 'a')); }, "request_id: 129 characters"},
      {[](auto* r) { r->set_logprobs(21); }, "logprobs: 21"},
      {[](auto* r) { r->mutable_stop()->add_strings(""); }, "stop[0]"},
      {[](auto* r) { r->mutable_stop()->add_token_ids(-4); }, "stop_token_ids[0]: token -4"},
      {[](auto* r) { r->mutable_tokens()->add_ids(1 << 30); }, "prompt[0]: token 1073741824"},
      {[](auto* r) { r->mutable_tokens(); }, "prompt: no tokens"},
      {[](auto* r) { r->mutable_chat()->set_tools_json("{"); }, "tools_json:"},
      {[](auto* r) { r->mutable_chat()->set_tools_json("{}"); }, "tools_json:"},
      {[](auto* r) { r->mutable_chat()->clear_messages(); }, "messages: is empty"},
      {[](auto* r) {
         r->mutable_chat()->add_messages()->set_role("user");
         r->mutable_chat()->set_thinking_effort("huge");
       },
       "thinking_effort: \"huge\""},
  };
  for (const auto& [change, expected] : cases) {
    v1::GenerateRequest r = Hello();
    change(&r);
    const Answer a = Run(r);
    EXPECT_EQ(a.status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << expected;
    EXPECT_THAT(a.status.error_message(), HasSubstr(expected));
  }
  v1::GenerateRequest r = Hello();
  r.set_model("other");
  EXPECT_EQ(Run(r).status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(mesh.started().size(), 0u);
}

TEST_F(InferenceServiceTest, OddReasonsReachTheClientAsBoundedText) {
  script = [](const mesh::StartDecode&) {
    Script s;
    s.refuse = absl::InternalError("odd \xff" + std::string(5000, 'x'));
    return s;
  };
  Start();
  const Answer a = Run(Hello());
  EXPECT_EQ(a.status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_THAT(a.status.error_message(), HasSubstr("odd \xEF\xBF\xBDxxx"));
  EXPECT_LE(a.status.error_message().size(), 1024u);
}

TEST_F(InferenceServiceTest, CancelAndDeadlineFreeTheSequence) {
  script = [this](const mesh::StartDecode&) {
    Script s = mesh.Say("first");
    s.end = false;
    return s;
  };
  Start();
  {
    grpc::ClientContext context;
    auto reader = stub->Generate(&context, Hello());
    v1::GenerateEvent event;
    ASSERT_TRUE(reader->Read(&event));
    context.TryCancel();
    EXPECT_TRUE(FakeMesh::Await([&] { return mesh.Cancelled(event.request_id()); }));
    while (reader->Read(&event)) {
    }
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_EQ(Run(Hello(), absl::Milliseconds(300)).status.error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(FakeMesh::Await([&] { return mesh.router->snapshot().gauges.live == 0; }));
  EXPECT_EQ(mesh.cancelled_count(), 2u);
}

TEST_F(InferenceServiceTest, DeadlineTravelsToTheWorker) {
  Start();
  Run(Hello(), absl::Seconds(15));
  const absl::Time deadline =
      absl::FromUnixNanos(static_cast<int64_t>(mesh.started()[0].deadline_unix_ns()));
  EXPECT_LT(deadline, absl::Now() + absl::Seconds(16));
  EXPECT_GT(deadline, absl::Now() + absl::Seconds(5));
}

TEST_F(InferenceServiceTest, LostWorkerEndsItsCallsQuickly) {
  script = [this](const mesh::StartDecode&) {
    Script s = mesh.Say("first");
    s.end = false;
    return s;
  };
  Start();
  std::thread killer([&] {
    FakeMesh::Await([&] { return mesh.router->snapshot().gauges.live == 1; });
    mesh.router->OnLinkClosed(FakeMesh::kLink, absl::UnavailableError("connection reset"));
  });
  const absl::Time begin = absl::Now();
  const Answer a = Run(Hello());
  killer.join();
  EXPECT_EQ(a.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(a.status.error_message(), HasSubstr("decode worker \"d1\" was lost"));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(2));
}

TEST_F(InferenceServiceTest, ManyCallsAtOnce) {
  script = [this](const mesh::StartDecode& start) {
    const std::string& id = start.request_id();
    Script s =
        mesh.Say("the quick brown fox jumps over the lazy dog " + id.substr(0, id.find('/')));
    s.gap = absl::Milliseconds(1);
    return s;
  };
  Start();
  std::atomic<int> good{0};
  std::vector<std::thread> clients;
  for (int i = 0; i < 40; ++i) {
    clients.emplace_back([&, i] {
      v1::GenerateRequest r = Hello();
      r.set_request_id("call-" + std::to_string(i));
      const Answer a = Run(r);
      good += a.status.ok() &&
              a.text == "the quick brown fox jumps over the lazy dog call-" + std::to_string(i);
    });
  }
  for (auto& c : clients) c.join();
  EXPECT_EQ(good, 40);
}

// A call that ends while its input waits to be tokenised never becomes a request.
TEST_F(InferenceServiceTest, LeavingBeforeTheInputIsTokenised) {
  Start();
  v1::GenerateRequest large = Hello();
  for (int token = 0; token < 500; ++token) {
    (*large.mutable_sampling()->mutable_logit_bias())[token] = 0;
  }
  large.set_request_id("r");
  ASSERT_GT(large.ByteSizeLong(), 4096u);
  EXPECT_EQ(Run(large).text, "Hello world");  // through the pool
  absl::Notification release;
  ASSERT_TRUE(mesh.pool.Post([&] { release.WaitForNotification(); }).ok());
  EXPECT_EQ(Run(large, absl::Milliseconds(200)).status.error_code(),
            grpc::StatusCode::DEADLINE_EXCEEDED);
  absl::SleepFor(absl::Milliseconds(500));  // the service hears of it after the client
  release.Notify();
  EXPECT_EQ(Run(large).text, "Hello world");  // the same id is free
  EXPECT_EQ(mesh.started().size(), 2u);
}

TEST_F(InferenceServiceTest, DrainingRouterFinishesWhatRunsAndTakesNothingNew) {
  script = [this](const mesh::StartDecode&) {
    Script s = mesh.Say("Hello world");
    s.gap = absl::Milliseconds(50);
    return s;
  };
  Start();
  Answer running;
  std::thread client([&] { running = Run(Hello()); });
  ASSERT_TRUE(FakeMesh::Await([&] { return mesh.started().size() == 1; }));
  mesh.router->Drain();
  const Answer refused = Run(Hello());
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_THAT(refused.status.error_message(), HasSubstr("draining"));
  client.join();
  EXPECT_TRUE(running.status.ok());
  EXPECT_EQ(running.text, "Hello world");
}

TEST_F(InferenceServiceTest, StoppingTheRouterEndsCalls) {
  script = [](const mesh::StartDecode&) {
    Script s;
    s.end = false;
    return s;
  };
  Start();
  std::thread stopper([&] {
    FakeMesh::Await([&] { return mesh.router->snapshot().gauges.live == 1; });
    mesh.router->Stop();
  });
  EXPECT_EQ(Run(Hello()).status.error_code(), grpc::StatusCode::UNAVAILABLE);
  stopper.join();
  EXPECT_EQ(Run(Hello()).status.error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(InferenceServiceTest, TokenizeCountAndModels) {
  Start();
  v1::TokenizeRequest request;
  request.set_text("Hello world");
  v1::TokenizeResponse ids;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(stub->Tokenize(&context, request, &ids).ok());
    const std::vector<TokenId> expected = *mesh.front->tokenizer().EncodeOrdinary("Hello world");
    EXPECT_EQ(std::vector<TokenId>(ids.ids().begin(), ids.ids().end()), expected);
  }
  *request.mutable_chat() = Hello().chat();
  v1::CountTokensResponse count;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(stub->CountTokens(&context, request, &count).ok());
  }
  Run(Hello());
  EXPECT_EQ(count.count(), static_cast<uint32_t>(mesh.started()[0].prompt_size()));
  grpc::ClientContext context;
  v1::ListModelsResponse models;
  ASSERT_TRUE(stub->ListModels(&context, {}, &models).ok());
  ASSERT_EQ(models.models_size(), 1);
  EXPECT_EQ(models.models(0).name(), "tiny");
  EXPECT_EQ(models.models(0).digest(), "d1");
  EXPECT_EQ(models.models(0).context_tokens(), 2048u);
  EXPECT_EQ(models.models(0).vocab_size(), mesh.front->tokenizer().vocab_size());
}

// The first call's end may be on its way still when the name comes again.
TEST_F(InferenceServiceTest, NameUsedAgainRightAfterACancelIsServed) {
  script = [this](const mesh::StartDecode& start) {
    Script s = mesh.Say("Hello world");
    s.end = start.max_tokens() != 1000;  // the first of each pair goes on until cancelled
    return s;
  };
  Start();
  for (int i = 0; i < 30; ++i) {
    v1::GenerateRequest request = Hello();
    request.set_request_id("same");
    request.mutable_stop()->set_max_tokens(1000);
    grpc::ClientContext context;
    auto reader = stub->Generate(&context, request);
    v1::GenerateEvent event;
    if (i % 2 == 0) {
      ASSERT_TRUE(reader->Read(&event));
      EXPECT_EQ(event.request_id(), "same");
    }
    context.TryCancel();
    request.mutable_stop()->set_max_tokens(100);
    const Answer again = Run(request);
    EXPECT_TRUE(again.status.ok()) << again.status.error_message();
    EXPECT_EQ(again.text, "Hello world");
    while (reader->Read(&event)) {
    }
    reader->Finish();
  }
}

// A router with one worker, which is asked for answers and for explanations of them.
class OperationsTest : public ::testing::Test {
 protected:
  OperationsTest() { mesh_.Join(); }

  FakeMesh mesh_;
  InferenceService inference_{mesh_.front.get(), mesh_.router.get(), &mesh_.pool};
  OperationsService operations_{mesh_.router.get()};
  const std::unique_ptr<GrpcServer> server_ =
      GrpcServer::Start({}, {&inference_, &operations_}).value();
  const std::unique_ptr<v1::Inference::Stub> stub_ = v1::Inference::NewStub(
      grpc::CreateChannel(server_->address(), grpc::InsecureChannelCredentials()));
};

TEST_F(OperationsTest, ExplainOverGrpcAndAsPeopleReadIt) {
  for (const char* id : {"one", "two"}) {
    grpc::ClientContext context;
    v1::GenerateRequest request;
    request.set_text("Once");
    request.set_request_id(id);
    const auto reader = stub_->Generate(&context, request);
    for (v1::GenerateEvent event; reader->Read(&event);) {
    }
    EXPECT_TRUE(reader->Finish().ok());
  }
  std::ostringstream out;
  ExplainOptions options = {.router = server_->address()};
  ASSERT_TRUE(RunExplain(options, out).ok());
  EXPECT_THAT(out.str(), ::testing::MatchesRegex(
                             "two/[0-9a-f]+  .* alone .*then: first token after .*, OK with .*"
                             "one/[0-9a-f]+  .* alone .*then: first token after .*, OK with .*"));
  out.str("");
  options.request_id = "one";
  options.json = true;
  ASSERT_TRUE(RunExplain(options, out).ok());
  v1::RequestExplanation r;
  ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(out.str(), &r).ok()) << out.str();
  EXPECT_EQ(r.placements(), 1u);
  EXPECT_EQ(r.reason(), "only one with room");
  ASSERT_EQ(r.candidates_size(), 1);
  EXPECT_TRUE(r.candidates(0).chosen());
  EXPECT_EQ(r.candidates(0).decode(), "d1");
  EXPECT_EQ(r.status(), "OK");
  EXPECT_GT(r.ttft_seconds(), 0);
  EXPECT_GE(r.seconds(), r.ttft_seconds());
  options.request_id = "nobody";
  const absl::Status unknown = RunExplain(options, out);
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.message()), ::testing::HasSubstr("last 1024 requests"));
}

// What is refused before the router is asked can be explained like the rest, and requests are found by their
// trace.
TEST_F(OperationsTest, RefusalsAndTracesOfGrpcAreExplained) {
  constexpr char kTrace[] = "4bf92f3577b34da6a3ce929d0e0e4736", kParent[] = "00f067aa0ba902b7";
  const std::string good = absl::StrFormat("00-%s-%s-01", kTrace, kParent);
  const auto ask = [&](const v1::GenerateRequest& request, int parents = 1) {
    grpc::ClientContext context;
    for (int i = 0; i < parents; ++i) context.AddMetadata("traceparent", good);
    const auto reader = stub_->Generate(&context, request);
    for (v1::GenerateEvent event; reader->Read(&event);) {
    }
    const grpc::StatusCode code = reader->Finish().error_code();
    const auto& told = context.GetServerInitialMetadata();
    const auto found = told.find("traceresponse");
    return std::pair(code, found == told.end()
                               ? std::string()
                               : std::string(found->second.data(), found->second.size()));
  };
  const auto explain = [&](const std::string& id) {
    std::ostringstream out;
    ExplainOptions options = {.router = server_->address(), .request_id = id, .json = true};
    EXPECT_TRUE(RunExplain(options, out).ok()) << id;
    v1::RequestExplanation r;
    EXPECT_TRUE(google::protobuf::util::JsonStringToMessage(out.str(), &r).ok()) << out.str();
    return r;
  };
  v1::GenerateRequest request;
  request.set_text("Once");
  request.set_request_id("served");
  const auto [ok, traced] = ask(request);
  EXPECT_EQ(ok, grpc::StatusCode::OK);
  EXPECT_EQ(explain("served").trace_id(), kTrace);
  EXPECT_EQ(explain("served").parent_span_id(), kParent);
  EXPECT_EQ(traced, absl::StrFormat("00-%s-%s-01", kTrace, explain("served").span_id()));
  request.set_request_id("twice");
  EXPECT_EQ(ask(request, 2).second, "");
  EXPECT_EQ(explain("twice").trace_id(), "");

  v1::GenerateRequest hot = request, broken = request, large = request;
  hot.set_request_id("hot");
  hot.mutable_sampling()->set_temperature(9);
  broken.set_request_id("broken");
  broken.mutable_chat()->set_tools_json("{");
  large.set_request_id("large");
  large.set_text(std::string(2 << 20, 'x'));
  for (const auto& refused : {hot, broken, large}) {
    const auto [code, span] = ask(refused);
    EXPECT_EQ(code, grpc::StatusCode::INVALID_ARGUMENT) << refused.request_id();
    const v1::RequestExplanation r = explain(refused.request_id());
    EXPECT_EQ(r.status(), "INVALID_ARGUMENT") << refused.request_id();
    EXPECT_TRUE(r.refused());
    EXPECT_EQ(r.trace_id(), kTrace);
    EXPECT_THAT(span, HasSubstr(r.span_id()));
  }
  // No room to tokenise: the request was not read, and its trace is what it is known by.
  mesh_.router->Drain();
  large.set_request_id("draining");
  EXPECT_EQ(ask(large).first, grpc::StatusCode::UNAVAILABLE);
  std::ostringstream out;
  ExplainOptions by_trace = {.router = server_->address(), .trace_id = kTrace};
  ASSERT_TRUE(RunExplain(by_trace, out).ok());
  EXPECT_THAT(out.str(), HasSubstr("the router is draining"));
}

TEST(InferenceRetryTest, WhoFindsNoRoomHearsWhenToComeAgain) {
  RouterOptions options;
  options.waiting_max = absl::Milliseconds(200);
  FakeMesh mesh("kimi_linear_tiny", options);
  mesh.script = [](const mesh::StartDecode&) {
    Script s;
    s.refuse = absl::ResourceExhaustedError("no slab");
    return s;
  };
  mesh.Join();
  InferenceService service(mesh.front.get(), mesh.router.get(), &mesh.pool);
  auto server = GrpcServer::Start({}, {&service}).value();
  const auto stub = v1::Inference::NewStub(
      grpc::CreateChannel(server->address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::GenerateRequest request;
  request.set_text("Once");
  const auto reader = stub->Generate(&context, request);
  v1::GenerateEvent event;
  EXPECT_FALSE(reader->Read(&event));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  const auto& metadata = context.GetServerTrailingMetadata();
  ASSERT_EQ(metadata.count("retry-after"), 1u);
  EXPECT_EQ(metadata.find("retry-after")->second, "1");
  EXPECT_EQ(metadata.find("retry-after-ms")->second, "1000");
}

}  // namespace
}  // namespace deltamesh
